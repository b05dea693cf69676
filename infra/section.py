"""`Section`: the base of every recipe section. Frozen, strict about names, one spelling in JSON."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen pydantic model that refuses unknown fields. Each package defines its own sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )
