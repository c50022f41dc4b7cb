//! Messages of device memory by a library of the device's vendor, such as NCCL.
//!
//! Algorithms and sums are those of [`Direct`](super::direct::Direct); messages alone take another way. The ranks of a group
//! meet in a circle of their own when they first need one, so that only ranks wait for each other that have something to exchange.
//! All waiting is the program's: the library is asked how far it is, and a rank that waits for a dead one still hears of an
//! abort.

use std::sync::Arc;

use super::pace;
use super::shared::Shared;
use super::wire::{Members, Vendor, Wire, least_sent};
use crate::backend::{Invitation, Peers, Port, Span};
use crate::error::{Error, Result};

/// The circles that this rank has met in, in the order in which they met; for good, because meeting takes long.
pub struct Circles {
    met: Vec<Meeting>,
    shared: Arc<Shared>,
}

/// Ranks that have met, or are about to.
struct Meeting {
    ranks: Arc<[usize]>,
    peers: Box<dyn Peers>,
}

impl Meeting {
    fn circle<'a>(&'a self, shared: &'a Shared) -> Circle<'a> {
        Circle { ranks: &self.ranks, peers: &*self.peers, shared }
    }
}

impl Circles {
    /// None yet.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { met: Vec::new(), shared }
    }

    /// The circle of the ranks of a group. Collective if they have not met: the first one invites the others.
    pub fn of(&mut self, port: &dyn Port, wire: &mut dyn Wire, group: &Members) -> Result<Circle<'_>> {
        let known = self.met.iter().position(|meeting| meeting.ranks == group.ranks);
        let place = match known {
            Some(place) => place,
            None => {
                let peers = port.meet(&invitation(port, wire, group)?, group.rank, group.size())?;
                let meeting = Meeting { ranks: group.ranks.clone(), peers };
                meeting.circle(&self.shared).until_done(wire, |_| Ok(()))?;
                self.met.push(meeting);
                self.met.len() - 1
            }
        };
        Ok(self.met[place].circle(&self.shared))
    }

    /// Leaves all circles in good order, which is the same on all their ranks.
    pub fn part(&mut self, wire: &mut dyn Wire) {
        for meeting in self.met.drain(..) {
            let parted = meeting.circle(&self.shared).until_done(wire, |peers| peers.part());
            // Torn apart, then; what it was for is done.
            parted.inspect_err(|error| log::debug!("leaving a circle: {error}")).ok();
        }
    }

    /// Leaves all circles at once. Others may wait for this rank for ever.
    pub fn tear(&mut self) {
        self.met.clear();
    }
}

/// One invitation for all ranks of a group.
fn invitation(port: &dyn Port, wire: &mut dyn Wire, group: &Members) -> Result<Invitation> {
    if group.rank == 0 {
        let made = port.invite()?;
        (1..group.size()).try_for_each(|to| wire.exchange_bytes(group, Some((to, &made)), None))?;
        return Ok(made);
    }
    let mut received = [0; size_of::<Invitation>()];
    wire.exchange_bytes(group, None, Some((0, &mut received)))?;
    Ok(received)
}

/// What carries the messages of ranks that have met.
pub struct Circle<'a> {
    /// Their numbers in the world.
    ranks: &'a [usize],
    peers: &'a dyn Peers,
    shared: &'a Shared,
}

impl Circle<'_> {
    /// Starts something and waits until it is done here. After an error nothing of it uses memory any more.
    fn until_done(&self, wire: &mut dyn Wire, start: impl FnOnce(&dyn Peers) -> Result<()>) -> Result<()> {
        let done = start(self.peers).and_then(|()| pace::settle(&*self.peers.mark()?, wire, self.shared));
        done.inspect_err(|_| self.peers.tear())
    }

    /// The number here of a rank of some group of ours.
    fn number(&self, group: &Members, rank: usize) -> Result<usize> {
        let found = self.ranks.binary_search(&group.ranks[rank]);
        found.map_err(|_| Error::internal(format!("rank {} is not of the circle {:?}", group.ranks[rank], self.ranks)))
    }

    /// As [`Wire::exchange_device`].
    pub fn exchange(
        &self,
        wire: &mut dyn Wire,
        group: &Members,
        send: Option<(usize, Span<'_>)>,
        receive: Option<(usize, Span<'_>)>,
    ) -> Result<()> {
        let peer =
            |side: Option<(usize, _)>| side.map(|(rank, span)| Ok((self.number(group, rank)?, span))).transpose();
        let (send, receive) = (peer(send)?, peer(receive)?);
        self.shared.add_sent(send.map_or(0, |(_, span)| span.words() * size_of::<f32>()));
        self.until_done(wire, |peers| peers.exchange(send, receive))
    }

    /// As [`Wire::vendor`], of all ranks of the circle.
    pub fn vendor(&self, wire: &mut dyn Wire, group: &Members, call: Vendor, memory: Span<'_>) -> Result<()> {
        self.shared.add_sent(least_sent(group, call, memory.words()));
        self.until_done(wire, |peers| peers.vendor(call, memory))
    }
}
