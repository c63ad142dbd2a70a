"""Saved states and models: ``checkpointing`` is what people call, ``saving`` and ``restoring`` what is done then.

``training_state`` is what that is done with, ``snapshot`` what one checkpoint is made of, ``meeting`` how ranks find
each other for it, ``files`` what lies in the folder, ``model_files`` the weights, ``safe_save`` why a folder is never
half written.
"""
