"""Plans for all workers together, from what all of them measure at the same time.

Each worker solves for itself, for the link that it is told; the coordinator says what link that is. A worker's plan
decides how much of a shared link it takes and so what others have: where others could gain by it, they are asked again
for what is left to them, and the better of both outcomes is kept (``cluster.joint``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.asking import Member
from cluster.events import EventLog
from cluster.history import Epoch
from cluster.joint import Link, Load, Outlook, is_better, links_of, score, settle
from cluster.messages import Budget, CoordinatorOptions, Measurement, Plans, Proposal, ReplanRequest
from cluster.roster import Roster
from flextensor.profile import TransferCurve

logger = logging.getLogger(__name__)

Budgets = dict[int, Budget]
Proposals = dict[int, Proposal]

SECOND_THOUGHTS = 2
"""How often workers are asked again."""
WORTH_ASKING = 0.02
"""A worker is asked again when a share of its step as large as this is at stake."""
OTHER_LINK = 0.05
"""... or when its link differs by this share from what it planned for."""


@dataclass
class _Offer:
    """What one worker is asked to plan for, and what came of it."""

    transfer: TransferCurve | None = None
    wait: float = 0.0


@dataclass
class _Draft:
    """Proposals of all, and what each was asked."""

    proposals: Proposals
    offers: dict[int, _Offer] = field(default_factory=dict)

    def loads(self) -> dict[int, Load]:
        """Those whose plans have a prediction."""
        found = {rank: Load.of(p.plan, self.offers[rank].wait) for rank, p in self.proposals.items()}
        return {rank: load for rank, load in found.items() if load is not None}


class Solver:
    """See the module."""

    def __init__(self, roster: Roster, options: CoordinatorOptions, events: EventLog) -> None:
        self._roster = roster
        self._options = options
        self._events = events

    async def solve(
        self, members: list[Member], request: ReplanRequest, number: int, now: Epoch
    ) -> tuple[Proposals, Budgets]:
        """A checked proposal of each member, and its budget. ``now``: the epoch in force. Raises RoundFailed."""
        ranks = {m.rank for m in members if request.workers is None or m.rank in request.workers}
        asked = request.budget is not None or request.latency
        budgets: Budgets = {
            m.rank: request.budget if asked and m.rank in ranks else now.budgets.get(m.rank) for m in members
        }
        measured: dict[int, Measurement] = {}
        if request.measure:
            # All measure, also those that keep their plans: what a link has is known from all that are on it.
            measured = await self._roster.ask_all("measure", members, lambda m: m.handle.measure.remote(number))
            self._events.write(
                "links_measured",
                round=number,
                bytes_per_second={rank: round(one.transfer.bandwidth) for rank, one in measured.items()},
                alone={rank: round(one.alone.bandwidth) for rank, one in measured.items()},
            )
        links = links_of(measured.values())
        even = {rank: link.even_share for link in links for rank in link.ranks}
        draft = _Draft({}, {m.rank: _Offer(_curve(measured.get(m.rank), even.get(m.rank))) for m in members})
        kept = {rank: plans for rank, plans in now.plans.items() if rank not in ranks}
        draft.proposals = await self.ask(members, number, budgets, kept, draft.offers)
        if measured:
            draft = await self._second_thoughts(draft, links, measured, members, number, budgets, ranks)
        return draft.proposals, budgets

    async def ask(
        self,
        members: list[Member],
        number: int,
        budgets: Mapping[int, Budget],
        plans: Mapping[int, Plans],
        offers: Mapping[int, _Offer] | None = None,
    ) -> Proposals:
        """A proposal of each of ``members``: ``plans`` where there are some for it, else what it solves."""
        offers = offers or {}
        nothing = _Offer()
        proposals: Proposals = await self._roster.ask_all(
            "propose",
            members,
            lambda m: m.handle.propose.remote(
                number,
                budgets.get(m.rank),
                plans.get(m.rank),
                offers.get(m.rank, nothing).transfer,
                offers.get(m.rank, nothing).wait,
            ),
        )
        return proposals

    async def _second_thoughts(
        self,
        draft: _Draft,
        links: tuple[Link, ...],
        measured: Mapping[int, Measurement],
        members: list[Member],
        number: int,
        budgets: Budgets,
        ranks: set[int],
    ) -> _Draft:
        lockstep = self._options.lockstep
        for _ in range(SECOND_THOUGHTS):
            outlook = settle(links, draft.loads(), lockstep)
            again = {
                rank: _Offer(_curve(measured[rank], outlook.bandwidth[rank]), outlook.wait(rank))
                for rank in ranks & outlook.pace.keys()
                if _worth_asking(draft, outlook, rank, budgets.get(rank), in_group=bool(self._options.group_of(rank)))
            }
            if not again:
                break
            chosen = [m for m in members if m.rank in again]
            newer = _Draft(
                {**draft.proposals, **await self.ask(chosen, number, budgets, {}, again)}, {**draft.offers, **again}
            )
            if self._is_worse(newer, draft, links):
                break
            draft = newer
        return draft

    def _is_worse(self, newer: _Draft, older: _Draft, links: tuple[Link, ...]) -> bool:
        """By the objective. Of two that are alike, the newer one was made for the link that there will be."""
        lockstep = self._options.lockstep
        ours, theirs = (score(settle(links, draft.loads(), lockstep), lockstep) for draft in (newer, older))
        return is_better(theirs, ours)


def _worth_asking(draft: _Draft, outlook: Outlook, rank: int, budget: Budget, *, in_group: bool) -> bool:
    told = draft.proposals[rank].plan.prediction
    offer = draft.offers[rank]
    if told is None or offer.transfer is None or told.step_seconds <= 0:
        return False
    if in_group and budget is None and abs(outlook.wait(rank) - offer.wait) > WORTH_ASKING * told.step_seconds:
        return True  # it waits for its group: it may stream more meanwhile, and take less memory
    other = outlook.bandwidth[rank] / offer.transfer.bandwidth - 1
    stalls = told.stall_seconds > WORTH_ASKING * told.step_seconds
    return other < -OTHER_LINK or (other > OTHER_LINK and stalls)


def _curve(measured: Measurement | None, bandwidth: float | None) -> TransferCurve | None:
    """What a worker measured, on a link of this bandwidth."""
    if measured is None or bandwidth is None:
        return None
    return measured.transfer.scaled(measured.transfer.bandwidth / bandwidth)
