# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The controller's side of work that goes on by itself on a node: look again and again, tell the user, outlive the connection.

The module of the same name starts the work or finds it running, and returns within seconds. Its result holds
`job: {state, stage, done, total, unit, rate, eta_s, message}`:

state    running | done | failed; without `job`, or with any other state, the result is final
stage    what is going on, in a word or two
done     amount so far, total: amount in all (0 or absent: unknown); unit: B (bytes), steps, or empty
rate     units per second, eta_s: seconds left; computed here from the amounts when absent
message  replaces the amount in the line, and is the error's text when the state is failed
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

RATE_WINDOW_S = 30.0


def human_bytes(count: float) -> str:
    """1234567890 -> '1.23 GB' (decimal, as disks and hubs count)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """75 -> '1 min 15 s', 7260 -> '2 h 1 min'."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _number(value: Any) -> float:
    try:
        return float(value or 0)
    except (TypeError, ValueError):
        return 0.0


class Progress:
    """Turns successive `job` dictionaries into lines; says when the next one is due."""

    def __init__(self, host: str, label: str, every_s: float, started: float) -> None:
        self._host, self._label, self._every_s = host, label, every_s
        self._samples: deque[tuple[float, float]] = deque()
        self._stage: str | None = None
        self._shown_at = 0.0
        self._started = started
        self.lines = 0

    def line(self, job: dict[str, Any], now: float) -> str | None:
        """The line to show now, or None while it is too early for another one."""
        stage = str(job.get("stage") or "")
        done, total = _number(job.get("done")), _number(job.get("total"))
        if stage != self._stage or (self._samples and done < self._samples[-1][1]):
            self._samples.clear()
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        if stage == self._stage and now - self._shown_at < self._every_s:
            return None
        self._stage, self._shown_at = stage, now
        self.lines += 1
        return " | ".join(part for part in (self._host, self._what(stage), *self._figures(job, done, total, now)) if part)

    def note(self, text: str) -> str:
        """A line about the wait itself."""
        self.lines += 1
        return " | ".join((self._host, self._label, text))

    def elapsed(self, now: float) -> float:
        return now - self._started

    def _what(self, stage: str) -> str:
        return ": ".join(part for part in (self._label, stage) if part)

    def _figures(self, job: dict[str, Any], done: float, total: float, now: float) -> list[str]:
        unit = str(job.get("unit") or "")
        # The steps of a build take a second or minutes: neither a rate nor a time left can be told from how many there were.
        rate = 0.0 if unit == "steps" else _number(job.get("rate")) or self._measured_rate()
        left = None if unit == "steps" else job.get("eta_s")
        if left is None and rate > 0 and total > done:
            left = (total - done) / rate
        amount = str(job.get("message") or "") or self._amount(done, total, unit)
        parts = [amount]
        if unit and rate > 0:
            parts.append(f"{human_bytes(rate)}/s" if unit == "B" else f"{rate:.3g} {unit}/s")
        parts.append(f"{human_seconds(_number(left))} left" if left is not None else f"{human_seconds(self.elapsed(now))} so far")
        return parts

    @staticmethod
    def _amount(done: float, total: float, unit: str) -> str:
        if not done and not total:
            return ""
        if unit == "B":
            text = f"{human_bytes(done)} of {human_bytes(total)}" if total else human_bytes(done)
        else:
            text = f"{done:g} of {total:g} {unit}".rstrip() if total else f"{done:g} {unit}".rstrip()
        return f"{text} ({100 * min(done, total) / total:.0f} %)" if total else text

    def _measured_rate(self) -> float:
        (t0, d0), (t1, d1) = self._samples[0], self._samples[-1]
        return (d1 - d0) / (t1 - t0) if t1 - t0 >= 1 else 0.0


class WatchedAction(ActionBase):
    """Runs the module of its own name until the job it reports has ended. A subclass sets LABEL, and may override `next_args`."""

    LABEL = ""
    # Seconds between the end of one look and the next; a module that blocks for a while itself sets both to 0.
    POLL_MIN_S = 1.0
    POLL_MAX_S = 5.0
    SHOW_EVERY_S = 10.0
    # How long the node may be out of reach in mid-wait: enough for a switch, a cable or a short network restart.
    RECONNECT_S = 120.0
    RECONNECT_PAUSE_S = 5.0

    _supports_check_mode = True
    _supports_async = False

    def next_args(self, args: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the next look, given those of the last one and its result."""
        return args

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        args = dict(self._task.args)
        host = str((task_vars or {}).get("inventory_hostname") or self._play_context.remote_addr or "")
        progress = Progress(host, self.LABEL, self.SHOW_EVERY_S, self._now())
        changed, diff, self._looks = False, None, 0
        latest = self._look(args, task_vars)
        while True:
            changed = changed or bool(latest.get("changed"))
            diff = diff or latest.get("diff")
            if not self._running(latest):
                break
            self._show(progress.line(latest["job"], self._now()))
            self._sleep(min(self.POLL_MAX_S, self.POLL_MIN_S + progress.elapsed(self._now()) / 30))
            args = self.next_args(args, latest)
            latest = self._look_again(args, task_vars, progress)
        result.update(latest)
        result["changed"] = changed
        result["module_runs"] = self._looks
        if diff:
            result["diff"] = diff
        job = latest.get("job") or {}
        if job.get("state") == "failed" and not result.get("failed"):
            result["failed"] = True
            result.setdefault("msg", str(job.get("message") or f"{self.LABEL or 'the job'} failed"))
        if progress.lines and not result.get("failed"):
            self._show(progress.note(f"done in {human_seconds(progress.elapsed(self._now()))}"))
        return result

    def _running(self, result: dict[str, Any]) -> bool:
        if result.get("failed") or result.get("skipped") or self._task.check_mode:
            return False
        job = result.get("job")
        return isinstance(job, dict) and job.get("state") == "running"

    def _look(self, args: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        self._looks += 1
        # A copy: Ansible adds its internal arguments to what it is given.
        result: dict[str, Any] = self._execute_module(module_args=dict(args), task_vars=task_vars)
        return result

    def _look_again(self, args: dict[str, Any], task_vars: dict[str, Any] | None, progress: Progress) -> dict[str, Any]:
        """A look in mid-wait: the work on the node outlives the connection, so a lost one is only a reason to try again."""
        lost_at = told_at = None
        while True:
            try:
                return self._look(args, task_vars)
            except AnsibleConnectionFailure as exc:
                now = self._now()
                lost_at = now if lost_at is None else lost_at
                gone = now - lost_at
                if gone >= self.RECONNECT_S:
                    raise AnsibleConnectionFailure(
                        f"{self.LABEL or 'the job'}: the node has been out of reach for {human_seconds(gone)}. The work there may still be"
                        " going on: run the same command again to look at it, nothing is started twice"
                    ) from exc
                if told_at is None or now - told_at >= self.SHOW_EVERY_S:
                    told_at = now
                    left = human_seconds(self.RECONNECT_S - gone)
                    self._show(progress.note(f"connection lost, the node goes on by itself; trying again for {left}"))
                self._sleep(self.RECONNECT_PAUSE_S)
                self._forget_connection()

    def _forget_connection(self) -> None:
        """Drop a dead multiplexed connection and the temporary folder that a restarted node may have lost."""
        self._connection._shell.tmpdir = None
        try:
            self._connection.reset()
        except Exception as exc:
            # The next look says what is wrong, if anything still is.
            Display().vvv(f"reset of the connection: {exc}")

    def _show(self, line: str | None) -> None:
        if line:
            Display().display(line)

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    @staticmethod
    def _sleep(seconds: float) -> None:
        time.sleep(seconds)
