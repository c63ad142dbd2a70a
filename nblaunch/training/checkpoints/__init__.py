"""Saved states and models: ``checkpointer`` is what scripts call, ``saving`` and ``restoring`` what is done then.

``snapshot`` is what one checkpoint is made of, ``rendezvous`` how ranks meet to save it, ``files`` what lies in its
folder, ``model_files`` the weights, ``safe_save`` why a folder is never half written.
"""
