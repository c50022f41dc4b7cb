//! What algorithms work on: memory that can be sent from and added to, wherever it is.

use std::ops::Range;

use super::wire::{Members, Vendor, Wire};
use crate::backend::cpu::add_serial;
use crate::error::{Error, Result};

/// Elements of one message, 1 MiB: what is received is added while it is still in the cache. Between two processes
/// of one machine 256 KiB took a fifth longer and 128 KiB a quarter; 4 MiB made no difference.
const CHUNK: usize = 1 << 18;

/// What happens to the elements that are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// They replace those in memory.
    Replace,
    /// They are added to those in memory.
    Add,
    /// They are kept aside under a number, for [`Operand::fold`].
    Aside(usize),
}

/// The memory of one collective. Ranges count its elements.
pub trait Operand {
    fn len(&self) -> usize;

    /// Sends the elements of some ranges to one rank and receives into ranges from another, which must not
    /// overlap. Sender and receiver name ranges of the same lengths in the same order.
    fn exchange(
        &mut self,
        wire: &mut dyn Wire,
        group: &Members,
        send: Option<(usize, &[Range<usize>])>,
        receive: Option<(usize, &[Range<usize>], Combine)>,
    ) -> Result<()>;

    /// Adds the pieces set aside and the one in memory, which is number `own`, by `additions` (into, from)
    /// in this order, and leaves piece 0 in `range`.
    fn fold(&mut self, range: Range<usize>, own: usize, additions: &[(usize, usize)]);

    /// Hands the whole memory to a collective of the MPI library.
    fn vendor(&mut self, wire: &mut dyn Wire, group: &Members, call: Vendor) -> Result<()>;
}

/// Memory that messages pass through; kept between collectives.
#[derive(Default)]
pub struct Scratch {
    /// Small ranges, gathered into one message.
    packed: Vec<f32>,
    received: Vec<f32>,
    aside: Vec<Vec<f32>>,
}

/// Host memory, which the wire may touch directly.
pub struct Host<'a> {
    pub memory: &'a mut [f32],
    pub scratch: &'a mut Scratch,
}

/// Cuts ranges into messages of at most `limit` elements; short ranges share one. Depends only on the
/// lengths of the ranges, so that sender and receiver cut alike.
fn messages(ranges: &[Range<usize>], limit: usize) -> Vec<Vec<Range<usize>>> {
    let (mut messages, mut message, mut room) = (Vec::new(), Vec::new(), limit);
    for range in ranges {
        let mut rest = range.clone();
        while !rest.is_empty() {
            let end = rest.end.min(rest.start + room);
            message.push(rest.start..end);
            room -= end - rest.start;
            rest.start = end;
            if room == 0 {
                messages.push(std::mem::take(&mut message));
                room = limit;
            }
        }
    }
    if !message.is_empty() {
        messages.push(message);
    }
    messages
}

/// A buffer of exactly `len` elements in reused memory.
fn resized(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

impl Host<'_> {
    /// Gathers the ranges of a message into one run of memory.
    fn pack(&mut self, ranges: &[Range<usize>]) -> usize {
        self.scratch.packed.clear();
        for range in ranges {
            self.scratch.packed.extend_from_slice(&self.memory[range.clone()]);
        }
        self.scratch.packed.len()
    }

    /// Sends one message and receives one.
    fn exchange_message(
        &mut self,
        wire: &mut dyn Wire,
        group: &Members,
        send: Option<(usize, &[Range<usize>])>,
        receive: Option<(usize, &[Range<usize>], Combine)>,
    ) -> Result<()> {
        // Whatever is one range goes between memory and wire directly.
        let (mut sent_directly, mut packed) = (0..0, 0);
        match send {
            Some((_, [one])) => sent_directly = one.clone(),
            Some((_, several)) => packed = self.pack(several),
            None => {}
        }
        let received_directly = match receive {
            Some((_, [one], Combine::Replace)) => one.clone(),
            _ => 0..0,
        };
        let len: usize = receive.map_or(0, |(_, ranges, _)| ranges.iter().map(Range::len).sum());

        let [outgoing, incoming] = self
            .memory
            .get_disjoint_mut([sent_directly.clone(), received_directly.clone()])
            .map_err(|_| Error::internal(format!("sends {sent_directly:?} and receives {received_directly:?}")))?;
        let outgoing = if packed > 0 { &self.scratch.packed[..packed] } else { outgoing };
        let incoming = if incoming.is_empty() { resized(&mut self.scratch.received, len) } else { incoming };
        wire.exchange(
            group,
            send.map(|(to, _)| (to, bytemuck::cast_slice(outgoing))),
            receive.map(|(from, ..)| (from, bytemuck::cast_slice_mut(incoming))),
        )?;

        let Some((_, ranges, combine)) = receive else { return Ok(()) };
        if !received_directly.is_empty() {
            return Ok(());
        }
        let mut received = &self.scratch.received[..len];
        for range in ranges {
            let (piece, rest) = received.split_at(range.len());
            match combine {
                Combine::Replace => self.memory[range.clone()].copy_from_slice(piece),
                Combine::Add => add_serial(piece, &mut self.memory[range.clone()]),
                Combine::Aside(number) => self.scratch.aside[number].extend_from_slice(piece),
            }
            received = rest;
        }
        Ok(())
    }
}

impl Operand for Host<'_> {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn exchange(
        &mut self,
        wire: &mut dyn Wire,
        group: &Members,
        send: Option<(usize, &[Range<usize>])>,
        receive: Option<(usize, &[Range<usize>], Combine)>,
    ) -> Result<()> {
        if let Some((_, _, Combine::Aside(number))) = receive {
            let aside = &mut self.scratch.aside;
            aside.resize_with(aside.len().max(number + 1), Vec::new);
            aside[number].clear();
        }
        let outgoing = send.map_or(Vec::new(), |(_, ranges)| messages(ranges, CHUNK));
        let incoming = receive.map_or(Vec::new(), |(_, ranges, _)| messages(ranges, CHUNK));
        for i in 0..outgoing.len().max(incoming.len()) {
            let send = send.zip(outgoing.get(i)).map(|((to, _), message)| (to, &message[..]));
            let receive = receive.zip(incoming.get(i)).map(|((from, _, how), message)| (from, &message[..], how));
            self.exchange_message(wire, group, send, receive)?;
        }
        Ok(())
    }

    fn fold(&mut self, range: Range<usize>, own: usize, additions: &[(usize, usize)]) {
        let memory = &mut self.memory[range];
        let aside = &mut self.scratch.aside;
        for &(into, from) in additions {
            if into == own {
                add_serial(&aside[from], memory);
            } else if from == own {
                add_serial(memory, &mut aside[into]);
            } else if let Ok([into, from]) = aside.get_disjoint_mut([into, from]) {
                add_serial(from, into);
            }
        }
        if own != 0 {
            memory.copy_from_slice(&aside[0]);
        }
    }

    fn vendor(&mut self, wire: &mut dyn Wire, group: &Members, call: Vendor) -> Result<()> {
        wire.vendor(group, call, self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_fill_up_and_share() {
        assert_eq!(messages(&[0..0, 7..7], 4), Vec::<Vec<Range<usize>>>::new());
        assert_eq!(messages(&[0..8, 8..10], 4), vec![vec![0..4], vec![4..8], vec![8..10]]);
        assert_eq!(messages(&[0..3, 6..9, 20..20, 30..31], 4), vec![vec![0..3, 6..7], vec![7..9, 30..31]]);
    }
}
