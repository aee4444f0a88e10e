"""GPUs by name, with what they do and cost: for step times by a roofline, transfers and prices.

Figures are those of the vendors' data sheets without sparsity. Prices are dated; any figure may be given another value,
and any GPU described, in `simulator.gpu`.
"""

from __future__ import annotations

import difflib
from datetime import date
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]

OFFERS = "among offers from {} to {} that were seen"
CATALOGUE: dict[str, dict[str, Any]] = {
    "A100-SXM": {
        "flops": 312e12, "bandwidth": 2.039e12, "memory": 80e9, "pcie": 32e9, "nvlink": 300e9,
        "dollars": 1.90, "as_of": date(2026, 11, 1), "source": OFFERS.format("0.80", "3.00"),
    },
    "H100-SXM": {
        "flops": 989e12, "bandwidth": 3.35e12, "memory": 80e9, "pcie": 64e9, "nvlink": 450e9,
        "dollars": 3.00, "as_of": date(2026, 11, 1), "source": OFFERS.format("1.99", "5.00"),
    },
    "H200-SXM": {
        "flops": 989e12, "bandwidth": 4.8e12, "memory": 141e9, "pcie": 64e9, "nvlink": 450e9,
        "dollars": 4.50, "as_of": date(2026, 11, 1), "source": OFFERS.format("2.50", "7.00"),
    },
    "L40S": {
        "flops": 362e12, "bandwidth": 0.864e12, "memory": 48e9, "pcie": 32e9,
        "dollars": 1.86, "as_of": date(2025, 6, 1), "source": "AWS g6e.xlarge on demand, us-east-1",
    },
    "L4": {
        "flops": 121e12, "bandwidth": 0.3e12, "memory": 24e9, "pcie": 32e9,
        "dollars": 0.80, "as_of": date(2025, 6, 1), "source": "AWS g6.xlarge on demand, us-east-1",
    },
}  # fmt: skip


class Gpu(BaseModel):
    """What one GPU does in a second and costs in an hour.

    Its name alone, as in H100-SXM or H100, stands for the catalogue's figures; with some figures beside the name, those
    are taken instead. A GPU that the catalogue does not have needs all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: str = "H100-SXM"
    flops: Rate = Field(description="dense bfloat16 operations a second")
    bandwidth: Rate = Field(description="bytes a second of its own memory")
    memory: Rate = Field(description="bytes of its own memory")
    pcie: Rate = Field(description="bytes a second to and from the host, each way")
    nvlink: Rate | None = Field(
        None, description="bytes a second to another GPU, each way; null: only by way of the host"
    )
    flops_efficiency: Share = Field(0.6, description="share of its operations that matrix products come to")
    bandwidth_efficiency: Share = Field(0.7, description="share of its own memory's bandwidth that steps come to")
    dollars: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(description="for an hour")
    as_of: date = Field(description="when that was the price")
    source: str = Field("", description="whose price it is")

    @model_validator(mode="before")
    @classmethod
    def _look_up(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, dict):
            return value
        name = value.get("name", cls.model_fields["name"].default)
        if name in CATALOGUE:
            return {**CATALOGUE[name], **value}
        missing = [field for field, info in cls.model_fields.items() if info.is_required() and field not in value]
        longer = [known for known in CATALOGUE if known.partition("-")[0] == name]
        if missing and len(longer) == 1:
            return {**CATALOGUE[longer[0]], **value, "name": longer[0]}
        if missing:
            near = difflib.get_close_matches(str(name), CATALOGUE, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"no GPU {name!r} in the catalogue; {hint}there are {', '.join(CATALOGUE)}; "
                f"one of your own needs {', '.join(missing)}"
            )
        return value
