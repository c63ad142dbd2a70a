"""Saved states and models: ``checkpointing`` is what people call, ``checkpointer`` what is done, ``files`` what lies
in the folder, ``model_files`` the weights, ``safe_save`` why a folder is never half written.
"""
