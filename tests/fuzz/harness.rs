//! The fuzzing loop of a reader.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use super::memory;
use super::mutate::{Form, Rng, mutated};

/// The time after which an input counts as a hang: far more than any takes on a busy machine. A
/// lease that records old views is waited for 125 s.
const HANG: Duration = Duration::from_secs(300);

/// The bytes that any input may take, however short: buffers, networks, and the limit for files of
/// any size.
const MEMORY: usize = 96 << 20;

/// The additional bytes for each byte of an input.
const PER_BYTE: usize = 512;

/// Serialises readers: panics and memory are those of the process.
static TURN: Mutex<()> = Mutex::new(());

/// The input that is being read.
static UNDER_WAY: Mutex<Option<(Instant, Failure)>> = Mutex::new(None);

/// The last panic of any thread.
static PANICKED: Mutex<Option<String>> = Mutex::new(None);

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An input that makes a reader fail.
#[derive(Clone)]
struct Failure {
    reader: String,
    seed: u64,
    round: u64,
    input: Vec<u8>,
}

impl Failure {
    /// Saves the input, and returns a message that describes the failure.
    fn describe(&self, why: &str) -> String {
        let Self { reader, seed, round, input } = self;
        let name = format!("fuzz-{reader}-{seed}-{round}").replace(' ', "-");
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let kept = std::fs::write(&path, input)
            .map_or_else(|e| e.to_string(), |()| path.display().to_string());
        let hex: String = input.iter().take(64).map(|byte| format!("{byte:02x}")).collect();
        let more = if input.len() > 64 { "…" } else { "" };
        let again = format!("HPCTRAIN_FUZZ_SEED={seed} HPCTRAIN_FUZZ_ROUND={round}");
        format!(
            "{reader}: {why}\n  input of {} bytes: {hex}{more}\n  in {kept}; to repeat it: {again} cargo test --test fuzz",
            input.len()
        )
    }
}

/// Ends the process, and prints the current input.
pub fn end(why: &str) {
    let under_way = lock(&UNDER_WAY).take();
    let message = under_way.map_or_else(|| why.to_owned(), |(_, failure)| failure.describe(why));
    eprintln!("{message}\n{}", std::backtrace::Backtrace::force_capture());
    std::process::abort();
}

fn variable<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Records the panics of all threads, and ends the process when an input hangs.
fn watch() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        set_hook(Box::new(|panic| {
            if hpctrain::panics::is_caught() {
                return;
            }
            if lock(&UNDER_WAY).is_some() {
                lock(&PANICKED).get_or_insert(panic.to_string());
            } else {
                eprintln!("{panic}");
            }
        }));
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let hangs =
                    lock(&UNDER_WAY).as_ref().is_some_and(|(since, _)| since.elapsed() > HANG);
                if hangs {
                    end(&format!("it has not ended after {} s", HANG.as_secs()));
                }
            }
        });
    });
}

/// The limits of a reader.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// The bytes that it may take for any input, however short.
    pub room: usize,
    /// The number of kinds of inputs that share its time.
    pub kinds: u32,
}

impl Terms {
    /// The limits of most readers.
    pub const USUAL: Self = Self { room: MEMORY, kinds: 1 };

    /// Returns the limits of a reader with `kinds` kinds of inputs.
    pub const fn one_of(kinds: u32) -> Self {
        Self { kinds, ..Self::USUAL }
    }
}

/// Runs a reader on mutated inputs for a while. `read` returns whether it accepted an input; the
/// `seeds` themselves must be accepted.
pub fn fuzz(reader: &str, form: Form, seeds: &[Vec<u8>], read: impl FnMut(&[u8]) -> bool) {
    fuzz_on(Terms::USUAL, reader, form, seeds, read);
}

/// Runs a reader like [`fuzz`], with other limits.
#[track_caller]
pub fn fuzz_on(
    terms: Terms,
    reader: &str,
    form: Form,
    seeds: &[Vec<u8>],
    mut read: impl FnMut(&[u8]) -> bool,
) {
    let Terms { room, kinds } = terms;
    let _turn = lock(&TURN);
    watch();
    for (number, seed) in seeds.iter().enumerate() {
        assert!(read(seed), "{reader}: seed {number} is refused");
    }
    let seed = variable("HPCTRAIN_FUZZ_SEED").unwrap_or(20);
    let budget = Duration::from_secs(variable("HPCTRAIN_FUZZ_SECONDS").unwrap_or(3)) / kinds;
    let only: Option<u64> = variable("HPCTRAIN_FUZZ_ROUND");
    let started = Instant::now();
    let mut round = only.unwrap_or(0);
    let mut taken = 0;
    let mut largest = 0;
    loop {
        let input = mutated(&mut Rng::new(&[seed, round], reader), form, seeds);
        let failure = Failure { reader: reader.into(), seed, round, input };
        *lock(&UNDER_WAY) = Some((Instant::now(), failure.clone()));
        let before = memory::reset();
        let read = catch_unwind(AssertUnwindSafe(|| read(&failure.input)));
        let took = memory::most() - before;
        *lock(&UNDER_WAY) = None;
        if let Some(panic) = lock(&PANICKED).take() {
            panic!("{}", failure.describe(&panic));
        }
        let most = room + PER_BYTE * failure.input.len();
        assert!(
            took <= most,
            "{}",
            failure.describe(&format!("it took {took} bytes of memory, more than {most}"))
        );
        taken += u64::from(read.unwrap_or(false));
        (largest, round) = (largest.max(took), round + 1);
        if only.is_some() || started.elapsed() >= budget {
            break;
        }
    }
    let first = only.unwrap_or(0);
    println!(
        "{reader}: {} inputs from seed {seed}, {taken} taken, {} KiB at most",
        round - first,
        largest >> 10
    );
}
