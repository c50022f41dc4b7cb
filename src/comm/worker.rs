//! The communication thread of a rank.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::circle::Circles;
use super::direct::Room;
use super::ledger::{Label, Size};
use super::operand::Scratch;
use super::pace::{self, Pace};
use super::shared::Shared;
use super::staged::Slots;
use super::wire::{Members, Wire};
use crate::activity::{Event, Track};
use crate::backend;
use crate::error::{Error, Result};

/// How long the thread looks out for the next request after one that somebody waited for, who will soon make it.
const LOOKOUT: Duration = Duration::from_micros(50);

/// What the thread is asked to do.
pub enum Request {
    /// A piece of communication; it answers through a `Reply` that it owns.
    Run(Box<dyn FnOnce(&mut Desk) + Send>),
    /// Leave the world, when all before is done.
    End,
}

impl Request {
    pub fn run(run: impl FnOnce(&mut Desk) + Send + 'static) -> Self {
        Self::Run(Box::new(run))
    }
}

/// What requests work with.
pub struct Desk {
    pub wire: Box<dyn Wire>,
    pub scratch: Scratch,
    /// For device memory that goes through the host.
    pub slots: Arc<Slots>,
    /// For device memory that goes by its address.
    pub room: Room,
    /// For device memory that goes by a library of its vendor's.
    pub circles: Circles,
    pub shared: Arc<Shared>,
    failed: Option<Error>,
    /// Whether somebody was waiting when the last request was done.
    awaited: bool,
}

impl Desk {
    /// Runs `act` unless an earlier request has failed: after that ranks no longer agree on what comes next.
    pub fn attempt<T>(&mut self, act: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let start = Instant::now();
        let result = act(self);
        self.shared.add_busy(start.elapsed());
        self.awaited = self.shared.has_waiters();
        if let Err(error) = &result {
            self.fail(error.clone());
        }
        result
    }

    /// Waits for what compute does with a buffer. That is no time of communication.
    pub fn after(&mut self, ready: Option<Box<dyn backend::Event>>) -> Result<()> {
        let (Some(ready), None) = (ready, &self.failed) else { return Ok(()) };
        pace::settle(&*ready, &mut *self.wire, &self.shared).inspect_err(|error| self.fail(error.clone()))
    }

    /// Why nothing works any more.
    pub fn failure(&self) -> Option<Error> {
        self.failed.clone()
    }

    fn fail(&mut self, error: Error) {
        self.failed = Some(error);
        self.circles.tear();
        self.wire.leave(false);
    }

    /// Lets posted messages go on; whether any have not left yet.
    fn sending(&mut self) -> bool {
        self.failed.is_none()
            && self.wire.progress().unwrap_or_else(|error| {
                self.fail(error);
                false
            })
    }

    /// As [`Desk::attempt`], for what the ledger remembers.
    pub fn recorded<T>(
        &mut self,
        group: &Members,
        label: &Label,
        act: impl FnOnce(&mut Self, u64) -> Result<T>,
    ) -> Result<T> {
        self.attempt(|desk| {
            let number = desk.shared.ledger().begin(group, label);
            let result = act(desk, number)?;
            let (mut ledger, activity) = (desk.shared.ledger(), &desk.shared.activity);
            if let Some(entry) = ledger.end()
                && activity.records()
            {
                activity.keep(Event {
                    track: Track::Communication,
                    name: label.op,
                    unit: label.unit.clone(),
                    start: entry.started,
                    end: entry.ended.unwrap_or(entry.started),
                    message: Some(entry.message()),
                });
            }
            Ok(result)
        })
    }

    /// As [`Desk::recorded`], for what all ranks of a group do together.
    pub fn collective<T>(
        &mut self,
        group: &Members,
        label: &Label,
        act: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.recorded(group, label, |desk, number| {
            if cfg!(debug_assertions) {
                desk.compare(group, label, number)?;
            }
            act(desk)
        })
    }

    /// Compares what I am about to do, my collective `number` of the group, with what my neighbour is.
    fn compare(&mut self, group: &Members, label: &Label, number: u64) -> Result<()> {
        let mut mine = format!("collective {number}: {}", announced(label)).into_bytes();
        // What is cut off long names still counts.
        let hash = crc32fast::hash(&mine);
        mine.resize(ANNOUNCED, b' ');
        mine.extend(hash.to_le_bytes());
        let mut theirs = [0; ANNOUNCED + size_of::<u32>()];
        self.wire.exchange_bytes(group, Some((group.next(), &mine)), Some((group.previous(), &mut theirs)))?;
        if mine == theirs {
            return Ok(());
        }
        let told = |rank: usize, text: &[u8]| {
            format!("rank {} wants {}", group.ranks[rank], String::from_utf8_lossy(&text[..ANNOUNCED]).trim_end())
        };
        let (me, other) = (told(group.rank, &mine), told(group.previous(), &theirs));
        Err(Error::internal(format!("ranks of a group disagree: {me}, {other}")))
    }
}

/// Bytes of a collective's description that another rank sees.
const ANNOUNCED: usize = 124;

/// What all ranks of the group must say alike of a collective.
fn announced(label: &Label) -> String {
    let mut text = label.op.to_string();
    if let Some(unit) = &label.unit {
        text += &format!(" of {unit}");
    }
    if let Size::Same(bytes) = label.size {
        text += &format!(", {bytes} bytes");
    }
    if let Some(root) = label.root {
        text += &format!(" from {root}");
    }
    text + " by " + label.algorithm
}

/// The handles' end of the thread.
pub struct Worker {
    requests: Sender<Request>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread. `open` makes the wire on it, or reports elsewhere why it cannot.
    ///
    /// If the system refuses a thread, `open` is dropped and every request finds that the thread has ended.
    pub fn start(
        name: String,
        shared: &Arc<Shared>,
        open: impl FnOnce() -> Option<Box<dyn Wire>> + Send + 'static,
    ) -> Self {
        let (requests, queue) = channel();
        let shared = shared.clone();
        let body = move || {
            shared.activity.here(Track::Communication);
            if let Some(wire) = open() {
                let (scratch, room) = (Scratch::new(shared.clone()), Room::new(&shared));
                let (slots, circles) = (Arc::new(Slots::new(shared.clone())), Circles::new(shared.clone()));
                let desk = Desk { wire, scratch, slots, room, circles, shared, failed: None, awaited: false };
                serve(desk, &queue);
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(body).ok();
        Self { requests, thread }
    }

    pub fn submit(&self, request: Request) {
        // When the thread has ended, the request's `Reply` is dropped, and its `Pending` says so.
        let _ = self.requests.send(request);
    }

    /// Lets the thread finish its queue, and waits for that.
    pub fn end(self) {
        self.submit(Request::End);
        if let Some(thread) = self.thread {
            // A panic there has failed the requests it could not answer.
            let _ = thread.join();
        }
    }
}

fn serve(mut desk: Desk, queue: &Receiver<Request>) {
    while let Some(Request::Run(run)) = next(&mut desk, queue) {
        run(&mut desk);
        if let Some(code) = desk.shared.aborted() {
            desk.wire.abort(code);
            desk.failed.get_or_insert_with(|| Error::comm(format!("aborted with code {code}")));
        }
    }
    // What was posted must leave before the wire goes.
    let mut pace = Pace::new(true);
    while desk.sending() {
        pace.pause(&desk.shared);
    }
    if desk.failed.is_none() {
        desk.circles.part(&mut *desk.wire);
        desk.wire.leave(true);
    }
}

/// The next request. The thread sleeps until it comes, unless messages are on their way or, after a request that
/// somebody waited for, the next one is about to come.
fn next(desk: &mut Desk, queue: &Receiver<Request>) -> Option<Request> {
    let mut lookout = std::mem::take(&mut desk.awaited).then(|| Instant::now() + LOOKOUT);
    let mut pace = Pace::new(true);
    loop {
        match queue.try_recv() {
            Ok(request) => return Some(request),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => {}
        }
        lookout = lookout.filter(|&end| Instant::now() < end);
        match (desk.sending(), lookout) {
            (false, None) => return queue.recv().ok(),
            (false, Some(_)) => std::thread::yield_now(),
            (true, _) => pace.pause(&desk.shared),
        }
    }
}
