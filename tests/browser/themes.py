"""Pictures of a cell in JupyterLab's light and dark theme, whose text must be legible in both."""

from __future__ import annotations

from tests.browser.lab import Page

LEAST_CONTRAST, OF_GRAPHICS = 4.5, 3.0
"""Minimum contrast of text, and of signs such as the lines of a legend. Source: WCAG 2.2, 1.4.3 and 1.4.11."""

# The contrast of each element that directly contains text, including the opacities of its parents. A canvas converts
# any CSS colour to numbers.
CONTRASTS = """
output => {
    const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const numbers = (colour) => {
        context.clearRect(0, 0, 1, 1); context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
    };
    const luminance = (rgb) => {
        const [r, g, b] = rgb.map(c => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    let page = output, paper = [0, 0, 0, 0];
    while (page && paper[3] < 1) { paper = numbers(getComputedStyle(page).backgroundColor); page = page.parentElement; }
    const found = [];
    for (const element of output.querySelectorAll(":is(.nbl-job, .jp-RenderedHTMLCommon) *")) {
        const text = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
        if (!text || element.tagName === "STYLE") continue;
        let opacity = 1;
        for (let e = element; e && e !== output; e = e.parentElement) opacity *= getComputedStyle(e).opacity;
        const [r, g, b, a] = numbers(getComputedStyle(element).color);
        const seen = [r, g, b].map((c, i) => a * opacity * c + (1 - a * opacity) * paper[i]);
        const [dark, light] = [luminance(seen), luminance(paper.slice(0, 3))].sort((x, y) => x - y);
        found.push([text, (light + 0.05) / (dark + 0.05)]);
    }
    return found;
}
"""


def photograph(page: Page, cell: int, name: str, *, is_dark_too: bool = True) -> int:
    """Take pictures of a cell's output in both themes, ``name.png`` and ``name_dark.png``, and check its text's
    contrast.

    Args:
        page: a page with the light theme.
        cell: position of the cell.
        name: name of the pictures.
        is_dark_too: False: take a picture only in the light theme, because changing it takes seconds.

    Returns: The smaller of the two themes' numbers of checked texts.
    """
    nums = []
    output = page.output(cell)
    for theme, ending in (("Dark", "_dark"), ("Light", "")) if is_dark_too else (("Light", ""),):
        if is_dark_too:
            _change_theme(page, theme)
        page.screenshot(f"{name}{ending}.png", output)
        contrasts = output.evaluate(CONTRASTS)
        illegible = [(text, contrast) for text, contrast in contrasts if contrast < _least_contrast(text)]
        assert not illegible, f"in the theme {theme}: {illegible}"
        nums.append(len(contrasts))
    return min(nums)


def _least_contrast(text: str) -> float:
    return LEAST_CONTRAST if any(map(str.isalnum, text)) else OF_GRAPHICS


def _change_theme(page: Page, theme: str) -> None:
    command = "apputils:change-theme"
    page.page.evaluate(
        f"() => window.jupyterapp.commands.execute('{command}', {{theme: 'JupyterLab {theme}'}})"
    )
    is_light = str(theme == "Light").lower()
    page.page.locator(f"body[data-jp-theme-light={is_light}]").wait_for(state="attached")
