//! Messages on a connection: a header of a group and a length, then so many bytes.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::net::TcpStream;

use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::add_serial;

/// Bytes of a header.
pub const HEADER: usize = 16;

/// Group of a rank's last words: it leaves in good order.
const BYE: u64 = u64::MAX;

/// Group of an abort, whose exit code takes the place of the length.
const ABORT: u64 = u64::MAX - 1;

/// Pieces of memory that are written at once.
const PIECES: usize = 32;

/// Elements that are received aside before they are added.
const ASIDE: usize = 1 << 16;

/// Bytes of memory that messages pass through.
pub const STAGING: usize = ASIDE * size_of::<f32>();

/// The header of a message.
pub fn header(group: u64, len: usize) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&group.to_le_bytes());
    bytes[8..].copy_from_slice(&(len as u64).to_le_bytes());
    bytes
}

/// A rank's last words.
pub fn bye() -> [u8; HEADER] {
    header(BYE, 0)
}

/// An abort.
pub fn abort(code: i32) -> [u8; HEADER] {
    header(ABORT, code as u32 as usize)
}

/// Writes on from byte `sent` of some pieces of memory. Whether something moved.
pub fn write(
    stream: &mut TcpStream,
    pieces: &[&[u8]],
    sent: &mut usize,
    peer: usize,
) -> Result<bool> {
    let mut moved = false;
    loop {
        let mut before = 0;
        let mut slices = Vec::with_capacity(PIECES.min(pieces.len()));
        for piece in pieces {
            let from = sent.saturating_sub(before).min(piece.len());
            before += piece.len();
            if from < piece.len() && slices.len() < PIECES {
                slices.push(IoSlice::new(&piece[from..]));
            }
        }
        if slices.is_empty() {
            return Ok(moved);
        }
        match stream.write_vectored(&slices) {
            Ok(0) => return Err(gone(peer)),
            Ok(len) => (*sent, moved) = (*sent + len, true),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(moved),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(gone(peer)),
        }
    }
}

/// Memory that a message fills, from its first byte to its last.
pub trait Sink {
    /// The rest of a piece of it, which is not empty while bytes are missing.
    fn room(&mut self) -> &mut [u8];

    /// So many bytes of that are filled.
    fn filled(&mut self, bytes: usize);
}

/// One piece of bytes.
pub struct Bytes<'a> {
    pub into: &'a mut [u8],
    pub at: usize,
}

impl Sink for Bytes<'_> {
    fn room(&mut self) -> &mut [u8] {
        &mut self.into[self.at..]
    }

    fn filled(&mut self, bytes: usize) {
        self.at += bytes;
    }
}

/// Pieces of elements, which are replaced or added to.
pub struct ElementPieces<'a, 'b> {
    pieces: &'a mut [&'b mut [f32]],
    /// Memory for terms; none where elements are replaced.
    aside: Option<&'a mut Vec<f32>>,
    piece: usize,
    /// Bytes of the piece before the room.
    done: usize,
    /// Bytes of the room that are filled.
    at: usize,
}

impl<'a, 'b> ElementPieces<'a, 'b> {
    /// To be filled with the elements of a message; with memory `aside` they are added.
    pub fn new(pieces: &'a mut [&'b mut [f32]], aside: Option<&'a mut Vec<f32>>) -> Self {
        let mut all = Self { pieces, aside, piece: 0, done: 0, at: 0 };
        all.skip_empty();
        all
    }

    fn skip_empty(&mut self) {
        while self.pieces.get(self.piece).is_some_and(|piece| self.done == size_of_val(*piece)) {
            (self.piece, self.done) = (self.piece + 1, 0);
        }
    }

    /// Elements of the room.
    fn elements(&self) -> usize {
        let rest = self
            .pieces
            .get(self.piece)
            .map_or(0, |piece| piece.len() - self.done / size_of::<f32>());
        if self.aside.is_some() { rest.min(ASIDE) } else { rest }
    }
}

impl Sink for ElementPieces<'_, '_> {
    fn room(&mut self) -> &mut [u8] {
        let len = self.elements();
        let all: &mut [f32] = match &mut self.aside {
            Some(aside) => {
                aside.resize(aside.len().max(len), 0.0);
                &mut aside[..len]
            }
            None => match self.pieces.get_mut(self.piece) {
                Some(piece) => &mut piece[self.done / size_of::<f32>()..],
                None => &mut [],
            },
        };
        &mut bytemuck::cast_slice_mut(all)[self.at..]
    }

    fn filled(&mut self, bytes: usize) {
        self.at += bytes;
        let len = self.elements();
        if self.at < len * size_of::<f32>() {
            return;
        }
        if let Some(aside) = &self.aside {
            let from = self.done / size_of::<f32>();
            add_serial(&aside[..len], &mut self.pieces[self.piece][from..from + len]);
        }
        (self.done, self.at) = (self.done + self.at, 0);
        self.skip_empty();
    }
}

/// A message that is arriving.
struct Arriving {
    group: u64,
    /// Bytes that are still missing.
    left: usize,
    /// Those that nobody asked for yet; none of a message that goes to its memory.
    kept: Option<Vec<u8>>,
}

/// The reading end of a connection.
#[derive(Default)]
pub struct Inbox {
    header: [u8; HEADER],
    have: usize,
    arriving: Option<Arriving>,
    /// Messages that came before they were asked for, by group.
    waiting: HashMap<u64, VecDeque<Vec<u8>>>,
    /// The other end has left in good order.
    left: bool,
}

/// A message, as a reader finds it.
pub enum Received {
    /// Nothing has moved.
    Nothing,
    /// Something has moved, but the message is not whole.
    Some,
    /// It is whole.
    Whole,
}

impl Inbox {
    /// A message of a group that came before it was asked for.
    pub fn take(&mut self, group: u64) -> Option<Vec<u8>> {
        self.waiting.get_mut(&group)?.pop_front()
    }

    /// Reads what is there of a header. Whether a message begins, or goes on.
    fn begin(&mut self, stream: &mut TcpStream, peer: usize) -> Result<bool> {
        while self.arriving.is_none() {
            match stream.read(&mut self.header[self.have..]) {
                Ok(0) if self.left => return Ok(false),
                Ok(0) => return Err(gone(peer)),
                Ok(len) => self.have += len,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(gone(peer)),
            }
            if self.have < HEADER {
                continue;
            }
            self.have = 0;
            let word = |at: usize| {
                u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| self.header[at + i]))
            };
            match (word(0), word(8)) {
                (BYE, _) => self.left = true,
                (ABORT, code) => {
                    return Err(Error::comm(format!(
                        "rank {peer} aborted with code {}",
                        code as u32 as i32
                    )));
                }
                (group, len) => {
                    let left = usize::try_from(len)
                        .map_err(|_| Error::comm(format!("rank {peer} sent a length of {len}")))?;
                    self.arriving = Some(Arriving { group, left, kept: None });
                }
            }
        }
        Ok(true)
    }

    /// Hears the last words of the other end, or its end, without taking in a message.
    pub fn listen(&mut self, stream: &mut TcpStream, peer: usize) -> Result<()> {
        self.begin(stream, peer).map(drop)
    }

    /// Whether a message has begun to arrive.
    pub fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Whether the other end has left in good order.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Reads on: the message that [`Inbox::undecided`] told of goes to `sink`.
    pub fn read_into(
        &mut self,
        stream: &mut TcpStream,
        peer: usize,
        sink: &mut dyn Sink,
    ) -> Result<Received> {
        let Some(now) = &mut self.arriving else { return Ok(Received::Nothing) };
        let moved = read(stream, peer, &mut now.left, sink)?;
        if now.left == 0 {
            self.arriving = None;
            return Ok(Received::Whole);
        }
        Ok(if moved { Received::Some } else { Received::Nothing })
    }

    /// Group and length of the message that is arriving, if its memory is not decided yet.
    pub fn undecided(
        &mut self,
        stream: &mut TcpStream,
        peer: usize,
    ) -> Result<Option<(u64, usize)>> {
        self.begin(stream, peer)?;
        Ok(self.arriving.as_ref().filter(|now| now.kept.is_none()).map(|now| (now.group, now.left)))
    }

    /// Takes in a message that nobody has asked for yet. Whether something moved.
    pub fn keep(&mut self, stream: &mut TcpStream, peer: usize) -> Result<bool> {
        let Some(now) = &mut self.arriving else { return Ok(false) };
        let kept = now.kept.get_or_insert_default();
        let begun = kept.len();
        // Memory grows with the bytes that arrive, whatever length was told.
        let want = now.left.min(ASIDE);
        kept.resize(begun + want, 0);
        let mut left = want;
        let moved = read(stream, peer, &mut left, &mut Bytes { into: &mut kept[begun..], at: 0 })?;
        kept.truncate(begun + want - left);
        now.left -= want - left;
        if now.left == 0 {
            let message = std::mem::take(kept);
            self.waiting.entry(now.group).or_default().push_back(message);
            self.arriving = None;
        }
        Ok(moved)
    }
}

/// Reads bytes as far as they have come. Whether something moved.
fn read(
    stream: &mut TcpStream,
    peer: usize,
    left: &mut usize,
    sink: &mut dyn Sink,
) -> Result<bool> {
    let mut moved = false;
    while *left > 0 {
        let room = sink.room();
        let len = room.len().min(*left);
        match stream.read(&mut room[..len]) {
            Ok(0) => return Err(gone(peer)),
            Ok(len) => {
                sink.filled(len);
                (*left, moved) = (*left - len, true);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(moved),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(gone(peer)),
        }
    }
    Ok(moved)
}

/// A connection has ended without last words.
pub fn gone(peer: usize) -> Error {
    Error::comm(format!("rank {peer} is gone: its connection ended"))
}
