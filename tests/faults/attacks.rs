//! Attacks on the ports of a run with parameter servers, by callers that know its secret and by
//! callers that do not. They implement the protocol independently, as docs/parameter-servers.md
//! describes it.
//!
//! `HPCTRAIN_ATTACK_STEPS` sets the number of steps, half of them under attack;
//! `HPCTRAIN_ATTACKS=Silent,Dribbling` selects attacks, to measure the cost of each. Attackers use
//! the same cores.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};
use snow::TransportState;

use crate::kills::Dice;
use crate::servers::{Job, SETTINGS};
use hpctrain_testkit::launch::Transport::Simulate;
use hpctrain_testkit::launch::program;
use hpctrain_testkit::runs::Run;

/// The pause of an attacker between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// The time that an attacker waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The number of connections that an attacker keeps open.
const HELD: usize = 100;

/// The magic and version of the protocol.
const OPENING: [u8; 12] = *b"hpctrain\x02\0\0\0";

/// A kind of attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Attack {
    RandomBytes,
    Http,
    OtherVersion,
    /// The first message of a handshake with a random tag.
    GuessedProof,
    /// A handshake with another secret.
    OtherSecret,
    /// The first message of a caller that knows the secret, recorded, then repeated.
    Recorded,
    /// Connections that send nothing.
    Silent,
    /// Connections that send one byte at a time.
    Dribbling,
    /// A caller that knows the secret announces messages that are too long.
    Lengths,
    /// A caller that knows the secret sends invalid requests.
    Requests,
}

const ALL: [Attack; 10] = [
    Attack::RandomBytes,
    Attack::Http,
    Attack::OtherVersion,
    Attack::GuessedProof,
    Attack::OtherSecret,
    Attack::Recorded,
    Attack::Silent,
    Attack::Dribbling,
    Attack::Lengths,
    Attack::Requests,
];

/// The attacks that fail authentication.
const UNAUTHENTICATED: [Attack; 3] = [Attack::GuessedProof, Attack::OtherSecret, Attack::Recorded];

fn connect(address: &str) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Returns a caller's first message, and the state of its handshake.
fn first(secret: &[u8]) -> (Vec<u8>, snow::HandshakeState) {
    let key: [u8; 32] = Sha256::digest(secret).into();
    let builder = snow::Builder::new("Noise_NNpsk0_25519_AESGCM_SHA256".parse().unwrap());
    let mut noise =
        builder.prologue(&OPENING).unwrap().psk(0, &key).unwrap().build_initiator().unwrap();
    let mut message = [OPENING.to_vec(), vec![0; 48]].concat();
    noise.write_message(&[], &mut message[12..]).unwrap();
    (message, noise)
}

/// Does the handshake of a caller; returns an error if the peer refuses it.
fn shake(stream: &mut TcpStream, secret: &[u8]) -> std::io::Result<TransportState> {
    stream.read_exact(&mut [0; 12])?;
    let (message, mut noise) = first(secret);
    stream.write_all(&message)?;
    let mut answer = [0; 49];
    stream.read_exact(&mut answer)?;
    noise.read_message(&answer, &mut [0]).map_err(std::io::Error::other)?;
    let mut transport = noise.into_transport_mode().map_err(std::io::Error::other)?;
    // Rank and ranks, the purpose of the connection, no encryption.
    let hello = [&[0; 8][..], &0x5e72u32.to_le_bytes(), &[0]].concat();
    let mut last = [0; 29];
    transport.write_message(&hello, &mut last).map_err(std::io::Error::other)?;
    stream.write_all(&last)?;
    Ok(transport)
}

/// Makes one attempt, whose connection stays open in `held` if the attack requires it. Errors mean
/// that the peer closed the connection.
fn attempt(
    attack: Attack,
    address: &str,
    secret: &[u8],
    dice: &mut Dice,
    held: &mut Vec<TcpStream>,
) -> std::io::Result<()> {
    if matches!(attack, Attack::Silent | Attack::Dribbling) {
        held.retain_mut(|stream| attack == Attack::Silent || stream.write_all(b"h").is_ok());
        if held.len() == HELD {
            held.remove(0);
        }
        held.push(connect(address)?);
        return Ok(());
    }
    let mut random = |len: usize| (0..len).map(|_| dice.below(256) as u8).collect::<Vec<_>>();
    let mut stream = connect(address)?;
    let length =
        |head: u32, body: u64| [&head.to_le_bytes()[..], &body.to_le_bytes(), b"{}"].concat();
    let message = match attack {
        Attack::RandomBytes => random(4096),
        Attack::Http => b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        Attack::OtherVersion => [b"hpctrain\x07\0\0\0".to_vec(), random(48)].concat(),
        Attack::GuessedProof => [OPENING.to_vec(), random(48 + 29)].concat(),
        Attack::OtherSecret => return shake(&mut stream, &random(32)).map(drop),
        // This is the same as a recording, since the attacker does not use the handshake state.
        Attack::Recorded => [first(secret).0, random(29)].concat(),
        Attack::Lengths => {
            shake(&mut stream, secret)?;
            match dice.below(4) {
                0 => length(u32::MAX, 0),
                1 => length(2, 1 << 62),
                2 => length((1 << 24) + 1, 0),
                _ => length(2, 1),
            }
        }
        Attack::Requests => {
            shake(&mut stream, secret)?;
            let head: &[u8] = match dice.below(6) {
                0 => b"[]",
                1 => b"\"Served\"",
                2 => br#"{"Pull":{}}"#,
                3 => &[0xff; 100],
                4 => br#"{"Beat":{"member":18446744073709551615}}"#,
                _ => &[b'['; 10_000],
            };
            [&(head.len() as u32).to_le_bytes()[..], &0u64.to_le_bytes(), head].concat()
        }
        Attack::Silent | Attack::Dribbling => unreachable!("handled before"),
    };
    stream.write_all(&message)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    stream.read_to_end(&mut Vec::new()).map(drop)
}

/// Attacker threads, one for each attack and address.
struct Attackers {
    stopped: Arc<AtomicBool>,
    attempts: Arc<Mutex<BTreeMap<Attack, u64>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Attackers {
    fn start(addresses: &[String], secret: &[u8]) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let attempts = Arc::new(Mutex::new(BTreeMap::new()));
        let chosen = std::env::var("HPCTRAIN_ATTACKS").ok();
        let is_chosen = |attack: &&Attack| {
            chosen
                .as_ref()
                .is_none_or(|names| names.split(',').any(|name| name == format!("{attack:?}")))
        };
        let all = ALL
            .iter()
            .filter(is_chosen)
            .flat_map(|attack| addresses.iter().map(|address| (*attack, address.clone())));
        let attacker = |(number, (attack, address)): (usize, (Attack, String))| {
            let stopped = stopped.clone();
            let attempts = attempts.clone();
            let secret = secret.to_vec();
            std::thread::spawn(move || {
                let mut dice = Dice(number as u64 + 1);
                let mut held = vec![];
                while !stopped.load(Ordering::Relaxed) {
                    let _ = attempt(attack, &address, &secret, &mut dice, &mut held);
                    *attempts.lock().unwrap().entry(attack).or_default() += 1;
                    std::thread::sleep(PAUSE);
                }
            })
        };
        let threads = all.enumerate().map(attacker).collect();
        Self { stopped, attempts, threads }
    }

    /// Ends the attacks and returns the number of attempts of each.
    fn end(mut self) -> BTreeMap<Attack, u64> {
        self.stopped.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
        std::mem::take(&mut *self.attempts.lock().unwrap())
    }
}

#[test]
fn attacks_change_no_bit_and_roll_nothing_back() {
    let steps = std::env::var("HPCTRAIN_ATTACK_STEPS").map_or(240, |steps| steps.parse().unwrap());
    let root = tempfile::tempdir().unwrap();
    let settings = [format!("run.steps={steps}"), "log.level=debug".into()];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    let reference =
        Run::new(Simulate(2), root.path(), "reference", &[&SETTINGS[..7], &settings].concat())
            .succeeds();
    let mut job = Job::begin(root.path(), "attacked", 1, 2, &settings);
    job.until_step(5);
    let status = job
        .run_alongside(program(["ps", "status", "--json", "--run"]).arg(job.files().0))
        .succeeded();
    let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
    let server = status["servers"][0]["address"].as_str().unwrap().to_string();
    let secret = std::fs::read(job.files().path("servers/secret")).unwrap();
    let since = Instant::now();
    job.until_step(steps / 2);
    let quiet = since.elapsed();
    let since = Instant::now();
    let attackers = Attackers::start(&[server, job.files().coordinator()], &secret);
    let last = job.files().checkpoint(steps as u64);
    job.coordinator.until("saved", || last.exists());
    let attacked = since.elapsed();
    let attempts = attackers.end();
    let files = job.ends();
    files.same_as(&reference, steps as u64, "attacked");

    let log = files.text("logs/coordinator.log");
    assert!(!log.contains("a server was lost"), "{log}");
    let refused: Vec<&str> =
        log.lines().filter(|line| line.contains("refused a connection from")).collect();
    let failed_authentications =
        refused.iter().filter(|line| line.ends_with("does not know this run's secret")).count();
    println!("half of {steps} steps took {quiet:.1?}, the other half under attack {attacked:.1?}");
    println!("attempts on two processes: {attempts:?}");
    println!(
        "the coordinator refused {} connections, of which {failed_authentications} failed authentication",
        refused.len()
    );
    // Half of the attempts are on the server.
    let unauthenticated: u64 =
        UNAUTHENTICATED.iter().filter_map(|attack| attempts.get(attack)).sum();
    assert!(
        failed_authentications as u64 >= unauthenticated / 4
            && (failed_authentications > 0) == (unauthenticated > 0),
        "{failed_authentications} of {unauthenticated}"
    );
    assert!(
        std::env::var_os("HPCTRAIN_ATTACKS").is_some() || attempts.len() == ALL.len(),
        "{attempts:?}"
    );
}
