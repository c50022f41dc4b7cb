//! Messages on a connection: a header with a group and a length, then that many bytes.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::net::TcpStream;

use hpctrain_base::error::{Error, Result};
use hpctrain_cpu::add_serial;

/// Bytes of a header.
pub const HEADER: usize = 16;

/// The group of a rank's last message, which announces an orderly exit.
const BYE: u64 = u64::MAX;

/// The group of an abort, whose header has the exit code instead of a length.
const ABORT: u64 = u64::MAX - 1;

/// The most pieces of memory that are written at once.
const PIECES: usize = 32;

/// The most elements that are received in staging memory before they are added.
const STAGED_ELEMENTS: usize = 1 << 16;

/// Bytes of staging memory for messages.
pub const STAGING: usize = STAGED_ELEMENTS * size_of::<f32>();

/// Returns the header of a message.
pub fn header(group: u64, len: usize) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&group.to_le_bytes());
    bytes[8..].copy_from_slice(&(len as u64).to_le_bytes());
    bytes
}

/// Returns the message of an orderly exit.
pub fn goodbye() -> [u8; HEADER] {
    header(BYE, 0)
}

/// Returns the message of an abort.
pub fn abort(code: i32) -> [u8; HEADER] {
    header(ABORT, code as u32 as usize)
}

/// Writes pieces of memory from byte `sent` on. Returns true on progress.
pub fn write(
    stream: &mut TcpStream,
    pieces: &[&[u8]],
    sent: &mut usize,
    peer: usize,
) -> Result<bool> {
    let mut progressed = false;
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
            return Ok(progressed);
        }
        match stream.write_vectored(&slices) {
            Ok(0) => return Err(gone(peer)),
            Ok(len) => (*sent, progressed) = (*sent + len, true),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(progressed),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(gone(peer)),
        }
    }
}

/// Memory that a message fills from its first byte to its last.
pub trait Sink {
    /// Returns the rest of the current piece, which is not empty while bytes are missing.
    fn room(&mut self) -> &mut [u8];

    /// Records that `bytes` bytes of it were filled.
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
    /// Staging memory for terms; `None` if elements are replaced.
    aside: Option<&'a mut Vec<f32>>,
    piece: usize,
    /// Bytes of the piece that are complete.
    done: usize,
    /// Bytes that are filled after them.
    at: usize,
}

impl<'a, 'b> ElementPieces<'a, 'b> {
    /// Creates a sink for the elements of a message. With staging memory `aside` they are added.
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

    /// Returns the number of elements that the sink can receive next.
    fn elements(&self) -> usize {
        let rest = self
            .pieces
            .get(self.piece)
            .map_or(0, |piece| piece.len() - self.done / size_of::<f32>());
        if self.aside.is_some() { rest.min(STAGED_ELEMENTS) } else { rest }
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

/// A message that is being received.
struct Arriving {
    group: u64,
    /// Bytes that are still missing.
    left: usize,
    /// The bytes of a message that was not requested yet; `None` if they go to a sink.
    kept: Option<Vec<u8>>,
}

/// The reading end of a connection.
#[derive(Default)]
pub struct Inbox {
    header: [u8; HEADER],
    have: usize,
    arriving: Option<Arriving>,
    /// Messages that arrived before they were requested, by group.
    waiting: HashMap<u64, VecDeque<Vec<u8>>>,
    /// Whether the other end has announced an orderly exit.
    left: bool,
    /// The exit code of the other end, if it has aborted.
    aborted: Option<i32>,
}

/// The progress of a read.
pub enum Received {
    /// No bytes have arrived.
    Nothing,
    /// Bytes have arrived, but the message is not complete.
    Some,
    /// The message is complete.
    Whole,
}

impl Inbox {
    /// Takes a message of a group that arrived before it was requested.
    pub fn take(&mut self, group: u64) -> Option<Vec<u8>> {
        self.waiting.get_mut(&group)?.pop_front()
    }

    /// Reads what has arrived of a header. Returns true if a message is being received.
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
                    let code = code as u32 as i32;
                    self.aborted = Some(code);
                    return Err(Error::comm(format!("rank {peer} aborted with code {code}")));
                }
                (group, len) => {
                    let left = usize::try_from(len).map_err(|_| {
                        Error::comm(format!("rank {peer} announces a message of {len} bytes"))
                    })?;
                    self.arriving = Some(Arriving { group, left, kept: None });
                }
            }
        }
        Ok(true)
    }

    /// Checks for an orderly exit, an abort or the end of the connection, without reading a
    /// message.
    pub fn listen(&mut self, stream: &mut TcpStream, peer: usize) -> Result<()> {
        self.begin(stream, peer).map(drop)
    }

    /// Returns true if a message is being received.
    pub fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Returns the exit code of the other end, if it has aborted.
    pub fn aborted(&self) -> Option<i32> {
        self.aborted
    }

    /// Returns true if the other end has announced an orderly exit.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Reads more of the message that [`Inbox::unclaimed`] has returned, into `sink`.
    pub fn read_into(
        &mut self,
        stream: &mut TcpStream,
        peer: usize,
        sink: &mut dyn Sink,
    ) -> Result<Received> {
        let Some(now) = &mut self.arriving else { return Ok(Received::Nothing) };
        let progressed = read(stream, peer, &mut now.left, sink)?;
        if now.left == 0 {
            self.arriving = None;
            return Ok(Received::Whole);
        }
        Ok(if progressed { Received::Some } else { Received::Nothing })
    }

    /// Returns the group and length of the message that is being received, if it has no destination
    /// yet.
    pub fn unclaimed(
        &mut self,
        stream: &mut TcpStream,
        peer: usize,
    ) -> Result<Option<(u64, usize)>> {
        self.begin(stream, peer)?;
        Ok(self.arriving.as_ref().filter(|now| now.kept.is_none()).map(|now| (now.group, now.left)))
    }

    /// Buffers a message that was not requested yet. Returns true on progress.
    pub fn keep(&mut self, stream: &mut TcpStream, peer: usize) -> Result<bool> {
        let Some(now) = &mut self.arriving else { return Ok(false) };
        let kept = now.kept.get_or_insert_default();
        let begun = kept.len();
        // Memory grows with the bytes that arrive, regardless of the announced length.
        let want = now.left.min(STAGED_ELEMENTS);
        kept.resize(begun + want, 0);
        let mut left = want;
        let progressed =
            read(stream, peer, &mut left, &mut Bytes { into: &mut kept[begun..], at: 0 })?;
        kept.truncate(begun + want - left);
        now.left -= want - left;
        if now.left == 0 {
            let message = std::mem::take(kept);
            self.waiting.entry(now.group).or_default().push_back(message);
            self.arriving = None;
        }
        Ok(progressed)
    }
}

/// Reads the bytes that have arrived. Returns true on progress.
fn read(
    stream: &mut TcpStream,
    peer: usize,
    left: &mut usize,
    sink: &mut dyn Sink,
) -> Result<bool> {
    let mut progressed = false;
    while *left > 0 {
        let room = sink.room();
        let len = room.len().min(*left);
        match stream.read(&mut room[..len]) {
            Ok(0) => return Err(gone(peer)),
            Ok(len) => {
                sink.filled(len);
                (*left, progressed) = (*left - len, true);
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(progressed),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(gone(peer)),
        }
    }
    Ok(progressed)
}

/// Creates the error of a connection that ended without an orderly exit.
pub fn gone(peer: usize) -> Error {
    Error::lost(format!("rank {peer} is gone: its connection ended"))
}
