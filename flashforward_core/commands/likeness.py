"""How alike videos are, frame by frame, measured on the device that decodes them. Frames are uint8 [B, F, H, W, 3]."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_DB = 100.0  # what equal frames count as
WINDOW, SIGMA = 11, 1.5  # SSIM's (Wang et al., 2004)
C1, C2 = 0.01**2, 0.03**2
CELLS = (8, 12)  # rows and columns of the grid of colours that stands for what a frame shows


def psnr(frames: Tensor, reference: Tensor) -> Tensor:
    """Return each frame's PSNR in dB, [B, F]; equal frames count as 100."""
    error = (frames.float() - reference.float()).div(255).square().mean(dim=(2, 3, 4))
    return (-10 * error.clamp(min=1e-30).log10()).clamp(max=MOST_DB)


def ssim(frames: Tensor, reference: Tensor) -> Tensor:
    """Return each frame's SSIM [B, F], of the luma, in a Gaussian window."""
    x, y = (_luma(video).flatten(0, 1).unsqueeze(1) for video in (frames, reference))
    window = _window(x.device)
    mean_x, mean_y = F.conv2d(x, window), F.conv2d(y, window)
    var_x = F.conv2d(x * x, window) - mean_x.square()
    var_y = F.conv2d(y * y, window) - mean_y.square()
    both = F.conv2d(x * y, window) - mean_x * mean_y
    found = (2 * mean_x * mean_y + C1) * (2 * both + C2)
    found = found / ((mean_x.square() + mean_y.square() + C1) * (var_x + var_y + C2))
    return found.mean(dim=(1, 2, 3)).view(frames.shape[:2])


def _luma(frames_BFHWC: Tensor) -> Tensor:
    weights = torch.tensor([0.2126, 0.7152, 0.0722], device=frames_BFHWC.device)  # BT.709
    return (frames_BFHWC.float() / 255) @ weights


def _window(device: torch.device) -> Tensor:
    at = torch.arange(WINDOW, device=device, dtype=torch.float32) - WINDOW // 2
    weights = (-at.square() / (2 * SIGMA**2)).exp()
    weights = weights / weights.sum()
    return (weights[:, None] * weights).view(1, 1, WINDOW, WINDOW)


def looks(frames: Tensor) -> Tensor:
    """Return what each frame shows as a vector of length 1, [B, F, X]: a coarse grid of colours, less mid-grey."""
    x = frames.float().div(255).sub(0.5).permute(0, 1, 4, 2, 3).flatten(0, 1)
    return F.normalize(F.adaptive_avg_pool2d(x, CELLS).flatten(1), dim=-1).view(*frames.shape[:2], -1)


@dataclass(slots=True)
class Consistency:
    """VBench's formula for consistency: each frame's likeness to the first and to the one before it, on average.

    VBench takes a network's features; these are coarse grids of colours.
    """

    first: Tensor | None = None
    last: Tensor | None = None
    found: list[Tensor] = field(default_factory=list)

    def add(self, frames: Tensor) -> None:
        """Take a video's next frames."""
        seen = looks(frames)
        self.first = seen[:, :1] if self.first is None else self.first
        before = torch.cat([seen[:, :1] if self.last is None else self.last, seen[:, :-1]], dim=1)
        self.last = seen[:, -1:]
        self.found.append(((seen * self.first).sum(-1) + (seen * before).sum(-1)) / 2)

    def per_video(self) -> Tensor:
        """Return each video's mean over its frames but the first, [B]."""
        return torch.cat(self.found, dim=1)[:, 1:].mean(dim=1)
