//! Messages over TCP: between ranks, to the coordinator of parameter servers, and to a server.

use std::io::{BufRead as _, Read, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::{Backend as _, MemoryKind};
use hpctrain::comm::{
    Algorithm, Comm, Connection, Credentials, HANDSHAKE_TIMEOUT, Handshake, PeerId, Secret,
    TcpRendezvous, call, start_tcp, write_secret,
};
use hpctrain::error::Result;
use serde_json::{Value, json};

use super::harness::{Terms, fuzz, fuzz_on};
use super::mutate::{Form, framed};
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::{Running, program, start, start_without_waiting};
use hpctrain_testkit::runs::Run;

/// The bytes of a caller's first message: magic, version, ephemeral key, tag.
const FIRST: usize = 8 + 4 + 32 + 16;

/// The bytes of its last message: its place, its wish for encryption, tag.
const LAST: usize = 12 + 1 + 16;

/// The purpose of connections of parameter servers.
const SERVERS: u32 = 0x5e72;

/// Returns the deadline of a handshake that begins now.
fn soon() -> Instant {
    Instant::now() + HANDSHAKE_TIMEOUT
}

fn credentials(secret: Secret) -> Credentials {
    Credentials { secret, encrypt: true }
}

/// Returns the program of a process that the coordinator accepts, which computes on `device`.
fn program_on(device: &Value) -> Value {
    // A piece at a time: a test that runs in parallel counts memory.
    let mut file =
        std::io::BufReader::new(std::fs::File::open(env!("CARGO_BIN_EXE_hpctrain")).unwrap());
    let mut sum = crc32fast::Hasher::new();
    loop {
        let piece = file.fill_buf().unwrap();
        if piece.is_empty() {
            break;
        }
        sum.update(piece);
        let bytes = piece.len();
        file.consume(bytes);
    }
    let build = format!("{:08x}", sum.finalize());
    json!({"version": env!("CARGO_PKG_VERSION"), "build": build, "device": device})
}

/// Creates a rendezvous directory of two ranks.
fn meeting_place(secret: Option<&Path>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    match secret {
        Some(of) => drop(std::fs::copy(Secret::path(of), Secret::path(dir.path())).unwrap()),
        None => write_secret(dir.path()).unwrap(),
    }
    dir
}

/// Does the common work of two ranks: a gather of texts, an all-gather of numbers, an all-reduce.
fn together(comm: &Comm<Cpu>) -> Result<()> {
    let world = comm.world();
    world.gather_bytes(vec![7; 100]).wait()?;
    world.all_gather_u64(&[1, 2, 3])?;
    let buffer = Cpu::new(1).upload(MemoryKind::Gradients, &[1.0; 1000])?;
    world.all_reduce(buffer, 0..1000).wait()?;
    world.barrier().wait()
}

/// Runs rank 0 of two, which use the rendezvous directory `dir`.
fn rank_0(dir: &Path) -> Result<()> {
    let comm: Comm<Cpu> = start_tcp(
        &TcpRendezvous { dir: dir.into(), rank: 0, ranks: 2, address: Ipv4Addr::LOCALHOST.into() },
        Algorithm::HalvingDoubling,
    )?;
    let done = together(&comm);
    comm.shutdown();
    done
}

/// Returns the address that rank 0 publishes.
fn address_of_0(dir: &Path) -> String {
    let path = dir.join("rank-0");
    loop {
        match std::fs::read_to_string(&path) {
            Ok(text) => return text.split_once(' ').unwrap().0.to_owned(),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Returns the bytes that a real rank 1 sends on its first connection after the handshake.
fn recorded() -> Vec<u8> {
    let place_0 = meeting_place(None);
    let place_1 = meeting_place(Some(place_0.path()));
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    std::fs::write(place_1.path().join("rank-0"), format!("{} host", proxy.local_addr().unwrap()))
        .unwrap();
    std::fs::write(place_0.path().join("rank-1"), "127.0.0.1:1 host").unwrap();
    let dir_0 = place_0.path().to_path_buf();
    let dir_1 = place_1.path().to_path_buf();
    let first = std::thread::spawn(move || rank_0(&dir_0));
    let second = std::thread::spawn(move || {
        let comm: Comm<Cpu> = start_tcp(
            &TcpRendezvous { dir: dir_1, rank: 1, ranks: 2, address: Ipv4Addr::LOCALHOST.into() },
            Algorithm::HalvingDoubling,
        )?;
        let done = together(&comm);
        comm.shutdown();
        done
    });
    let (sender, receiver) = channel();
    let address = address_of_0(place_0.path());
    // The two connections, in order.
    for connection in 0..2 {
        let (mut caller, _) = proxy.accept().unwrap();
        let mut rank = TcpStream::connect(&address).unwrap();
        let mut back_from = rank.try_clone().unwrap();
        let mut back_to = caller.try_clone().unwrap();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(Shutdown::Write);
        });
        let sender = sender.clone();
        std::thread::spawn(move || {
            let mut said = Vec::new();
            let mut piece = vec![0; 1 << 16];
            while let Ok(len @ 1..) = caller.read(&mut piece) {
                said.extend_from_slice(&piece[..len]);
                rank.write_all(&piece[..len]).unwrap();
            }
            let _ = rank.shutdown(Shutdown::Write);
            sender.send((connection, said)).unwrap();
        });
    }
    first.join().unwrap().unwrap();
    second.join().unwrap().unwrap();
    let (_, said) = (0..2).map(|_| receiver.recv().unwrap()).min().unwrap();
    said[FIRST + LAST..].to_vec()
}

#[test]
fn ranks_read_messages() {
    let seed = recorded();
    assert!(seed.len() > 1000);
    let kept = meeting_place(None);
    let credentials = credentials(Secret::read(kept.path()).unwrap());
    let read = |input: &[u8]| {
        let place = meeting_place(Some(kept.path()));
        std::fs::write(place.path().join("rank-1"), "127.0.0.1:1 host").unwrap();
        let dir = place.path().to_path_buf();
        let rank = std::thread::spawn(move || rank_0(&dir));
        let address = address_of_0(place.path());
        let connections = [0, 1].map(|connection| {
            let stream = TcpStream::connect(&address).unwrap();
            let caller = PeerId { rank: 1, ranks: 2, channel: connection };
            call(stream, &credentials, caller, soon()).and_then(Connection::into_stream).unwrap()
        });
        let mut said = connections[0].try_clone().unwrap();
        // The other end may have closed the connection before it has read everything.
        let _ = said.write_all(input);
        connections.iter().for_each(|connection| drop(connection.shutdown(Shutdown::Write)));
        rank.join().is_ok_and(|done| done.is_ok())
    };
    // Lengths of texts that are far too large, instead of each length.
    for at in frames(&seed).into_iter().filter(|frame| frame.len() == 8) {
        let mut said = seed.clone();
        said[at].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        assert!(!read(&said));
    }
    // The bytes that one rank broadcasts may be 1 GiB.
    fuzz_on(
        Terms { room: 5 << 28, ..Terms::USUAL },
        "TCP between ranks",
        Form::Bytes,
        &[seed],
        read,
    );
}

/// Returns the ranges of the messages in `said`, without their headers.
fn frames(said: &[u8]) -> Vec<Range<usize>> {
    let mut found = vec![];
    let mut at = 0;
    while let Some(header) = said.get(at..).and_then(|rest| rest.first_chunk::<16>()) {
        let len = u64::from_le_bytes(*header.last_chunk().unwrap()) as usize;
        found.push(at + 16..at + 16 + len);
        at += 16 + len;
    }
    found
}

#[test]
fn handshakes_of_strangers_are_refused() {
    let place = meeting_place(None);
    let known = credentials(Secret::read(place.path()).unwrap());
    // The messages of a caller with another secret: nothing that a stranger can send is valid.
    let seed = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let other = credentials(Secret::new(vec![3; 32]).unwrap());
        let caller = std::thread::spawn(move || {
            let stream = TcpStream::connect(address).unwrap();
            call(stream, &other, PeerId { rank: 1, ranks: 2, channel: 0 }, soon()).is_err()
        });
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&[b"hpctrain".as_slice(), &2u32.to_le_bytes()].concat()).unwrap();
        let mut said = vec![0; FIRST];
        stream.read_exact(&mut said).unwrap();
        drop(stream);
        assert!(caller.join().unwrap());
        said
    };
    let mut first = true;
    fuzz("handshake", Form::Bytes, &[seed], |input| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stranger.write_all(input).unwrap();
        stranger.shutdown(Shutdown::Write).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let mut handshake = Handshake::begin(stream, &known).unwrap();
        while let Ok(caller) = handshake.advance() {
            assert!(caller.is_none(), "a stranger is let in");
            std::thread::yield_now();
        }
        std::mem::take(&mut first)
    });
}

/// A run with parameter servers: its coordinator and its server. A test plays its workers.
struct Served {
    run: PathBuf,
    secret: Secret,
    coordinator: Running,
    server: Running,
    terms: Value,
    _root: tempfile::TempDir,
}

impl Served {
    fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let settings = [
            "model.width=16",
            "run.steps=1000",
            "parallel.virtual_ranks=2",
            "parameter_server.timeout=600",
        ];
        let run = Run::new(Alone, root.path(), "x", &settings);
        let mut command = program(["ps", "coordinator"]);
        command.args(run.command().get_args().skip(1)).args(["--servers", "1", "--workers", "1"]);
        let coordinator = start(&mut command);
        let run = run.files().0;
        let server = start_without_waiting(
            &coordinator,
            program(["ps", "server", "--timeout", "600", "--run"]).arg(&run),
        );
        let published = run.join("servers/coordinator");
        let mut served = Self {
            secret: Secret::new(vec![0; 32]).unwrap(),
            run,
            coordinator,
            server,
            terms: Value::Null,
            _root: root,
        };
        served.coordinator.until("publishes its address", || published.exists());
        served.secret = Secret::read(&served.run.join("servers")).unwrap();
        // It waits for a worker before it opens the run.
        while served.terms.is_null() {
            let join = json!({"Join": {"host": "here", "process": 1, "program": program_on(&json!("CPU"))}});
            let message = framed(join.to_string().as_bytes(), &[]);
            let answer = served.ask(&served.coordinator_address(), &message).unwrap();
            served.terms = answer["Ok"]["Welcome"]["terms"].clone();
            std::thread::sleep(Duration::from_millis(20));
        }
        served
    }

    fn coordinator_address(&self) -> String {
        let text = std::fs::read_to_string(self.run.join("servers/coordinator")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["address"].as_str().unwrap().into()
    }

    fn server_address(&self) -> String {
        self.terms["addresses"][0].as_str().unwrap().into()
    }

    /// Sends a message to a process, and returns its first answer.
    fn ask(&self, address: &str, said: &[u8]) -> Option<Value> {
        let stream = TcpStream::connect(address).unwrap();
        let caller = PeerId { rank: 0, ranks: 0, channel: SERVERS };
        let called = call(stream, &credentials(self.secret.clone()), caller, soon());
        let mut stream = called.and_then(Connection::into_stream).unwrap();
        // It may have closed the connection already.
        let _ = stream.write_all(said).and_then(|()| stream.shutdown(Shutdown::Write));
        let mut answer = Vec::new();
        let _ = stream.take(1 << 26).read_to_end(&mut answer);
        let head = u32::from_le_bytes(*answer.first_chunk()?) as usize;
        serde_json::from_slice(answer.get(12..12 + head)?).ok()
    }

    /// Panics if a process has ended, has panicked, or takes too much memory.
    fn is_well(&mut self) {
        for (name, process) in
            [("coordinator", &mut self.coordinator), ("server", &mut self.server)]
        {
            let printed = process.printed();
            assert!(process.runs(), "the {name} has ended: {printed}");
            assert!(
                !printed.contains("panicked") && !printed.contains("internal error"),
                "the {name}: {printed}"
            );
            let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
            let most = status
                .lines()
                .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
            let most: usize = most.unwrap().trim().parse().unwrap();
            assert!(most < MEMORY, "the {name} took {most} KiB");
        }
    }
}

/// The most memory of a process, in KiB: some 60 MiB, and heads of messages of up to 16 MiB.
const MEMORY: usize = 400 << 10;

/// The memory of this process is not limited: the readers are other processes.
const ANY: usize = usize::MAX / 2;

fn message(head: &Value, body: &[u8]) -> Vec<u8> {
    framed(head.to_string().as_bytes(), body)
}

#[test]
fn coordinators_read_messages() {
    let mut served = Served::start();
    let address = served.coordinator_address();
    let generation = served.terms["generation"].clone();
    let status = served.ask(&address, &message(&json!("Status"), &[])).unwrap();
    let device = status["Ok"]["Status"]["devices"]["server"].clone();
    let seconds = json!({"compute": 0.5, "loader": 0.0, "pull": 0.1, "push": 0.1});
    let losses = [1.5f64.to_bits(), 2.5f64.to_bits()];
    let next = |report: Value| json!({"Next": {"member": 2, "generation": generation, "data": null, "report": report}});
    let event = json!({"name": "forward", "unit": "h.0", "start": 5, "end": 9, "details": {}});
    let seeds = [
        json!({"Serve": {"address": "127.0.0.1:1", "generation": generation, "program": program_on(&device)}}),
        json!("Served"),
        json!({"Terms": {"host": "here", "process": 5}}),
        json!({"Join": {"host": "here", "process": 5, "program": program_on(&json!("CPU"))}}),
        next(json!(null)),
        next(json!({"VirtualRanks": {"ticket": 1, "losses": losses, "seconds": seconds}})),
        next(
            json!({"Batch": {"ticket": 1, "batch": 0, "loss": losses[0], "norm": losses[1], "staleness": 0, "seconds": seconds}}),
        ),
        next(json!({"Chunks": {"ticket": 1, "sums": [losses]}})),
        json!({"Beat": {"member": 2}}),
        json!({"Leave": {"member": 2}}),
        json!("Status"),
        json!("Clock"),
        json!({"Events": {"process": "worker", "events": [["compute", event]], "lost": 0}}),
    ];
    let seeds = seeds.map(|head| message(&head, &[]));
    fuzz_on(Terms { room: ANY, kinds: 1 }, "coordinator", Form::Message, &seeds, |input| {
        // A worker that failed ends the run, as it should.
        if input.windows(6).any(|word| word == b"Failed") {
            return false;
        }
        let answer = served.ask(&address, input);
        served.is_well();
        answer.is_some_and(|answer| answer.get("Ok").is_some())
    });
}

#[test]
fn servers_read_messages() {
    let mut served = Served::start();
    let address = served.server_address();
    let generation = served.terms["generation"].clone();
    let pieces: Vec<Value> = served.terms["pieces"][0].as_array().unwrap().clone();
    let extent = |piece: &Value| {
        let [start, end] = ["start", "end"].map(|end| piece["range"][end].as_u64().unwrap());
        (end - start) as usize
    };
    let elements: usize = pieces.iter().map(extent).sum();
    let all = json!({"start": 0, "end": pieces.len()});
    let known = vec![Value::Null; pieces.len()];
    let step = served.terms["start"]["step"].clone();
    let virtual_ranks =
        json!({"VirtualRanks": {"step": step, "virtual_ranks": {"start": 0, "end": 1}}});
    let batch = json!({"Batch": {"ticket": 1, "scale": 1.0f32.to_bits(), "versions": vec![0; pieces.len()]}});
    let hyper = json!({"lr": 0.01f32.to_bits(), "weight_decay": 0, "step": 1, "grad_scale": 1.0f32.to_bits()});
    let body: Vec<u8> = (0..elements).flat_map(|i| (i as f32 * 1e-6).to_le_bytes()).collect();
    let push = |of: &Value| json!({"Push": {"generation": generation, "member": 1, "line": 0, "number": 1, "of": of, "pieces": all}});
    let seeds = [
        (
            json!({"Pull": {"generation": generation, "of": "Live", "pieces": all, "known": known}}),
            &[][..],
        ),
        (
            json!({"Pull": {"generation": generation, "of": {"Cut": 1}, "pieces": all, "known": known}}),
            &[],
        ),
        (push(&virtual_ranks), &body),
        (push(&batch), &body),
        (json!({"Squares": {"generation": generation, "step": step}}), &[]),
        (json!({"Norms": {"generation": generation, "hyper": hyper}}), &[]),
        (
            json!({"Update": {"generation": generation, "step": step, "hyper": hyper, "trust": []}}),
            &[],
        ),
        (
            json!({"Update": {"generation": generation, "step": step, "hyper": null, "trust": [[1, 2], [3]]}}),
            &[],
        ),
        (json!({"Revoke": {"generation": generation, "ticket": 1}}), &[]),
        (json!({"Cut": {"generation": generation, "cut": 1}}), &[]),
        (json!("Load"), &[]),
    ];
    let mut plain = true;
    let count = seeds.len();
    let seeds = seeds.map(|(head, body)| message(&head, body));
    let mut asked = 0;
    fuzz_on(Terms { room: ANY, kinds: 2 }, "server", Form::Message, &seeds, |input| {
        let answer = served.ask(&address, input);
        served.is_well();
        asked += 1;
        plain &= asked <= count;
        // Some of the seeds are refused because of the state of the run, with an answer.
        answer.is_some_and(|answer| answer.get("Ok").is_some() || plain)
    });
    // Without the parts of the assignment that a server does not check: a network of any size is
    // memory that was requested.
    let mut terms = served.terms.clone();
    let kept = ["config", "vocabulary", "workers", "preprocessing"]
        .map(|key| (key, terms.as_object_mut().unwrap().remove(key).unwrap()));
    let seed = json!({"terms": terms, "server": 0, "from": null, "with_state": false, "part": 0});
    let mut read = |input: &[u8]| {
        let Ok(mut assignment) = serde_json::from_slice::<Value>(input) else { return false };
        if let Some(terms) = assignment.get_mut("terms").and_then(Value::as_object_mut) {
            terms.extend(kept.iter().map(|(key, value)| (key.to_string(), value.clone())));
        }
        let answer = served.ask(&address, &message(&json!({"Assign": assignment}), &[]));
        served.is_well();
        answer.is_some_and(|answer| answer.get("Ok").is_some())
    };
    let seed = seed.to_string();
    for (what, instead) in [
        ("\"server\":0", "\"server\":7"),
        ("\"start\":0", "\"start\":18446744073709551615"),
        ("\"end\":", "\"end\":99999999"),
        ("\"unit\":0", "\"unit\":9999"),
    ] {
        assert!(seed.contains(what), "{seed}");
        assert!(!read(seed.replacen(what, instead, 1).as_bytes()), "{instead}");
    }
    fuzz_on(Terms { room: ANY, kinds: 2 }, "assignment", Form::Json, &[seed.into_bytes()], read);
}
