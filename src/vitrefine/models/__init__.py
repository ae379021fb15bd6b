"""The papers' models, registered in timm: importing this makes `timm.create_model("lit_ti")` work."""

from vitrefine.models import cb_vit, lit, localvit, pvt, refined_vit

__all__ = ["cb_vit", "lit", "localvit", "pvt", "refined_vit"]
