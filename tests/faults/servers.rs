//! Faults of runs with parameter servers: workers, servers and the coordinator that are killed,
//! stopped or asked to leave, and callers that do not belong to the run.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::kills::Dice;
use crate::{kill, lines, refused, saves};
use hpctrain_testkit::launch::Transport::{Alone, Simulate};
use hpctrain_testkit::launch::{
    Ended, LIMIT, Running, finish, program, send, start, start_without_waiting,
};
use hpctrain_testkit::runs::{Run, RunFiles, json};

/// Settings with steps of a few milliseconds, whose bits do not depend on the workers, and a short
/// timeout.
pub const SETTINGS: [&str; 8] = [
    "model.width=64",
    "parallel.virtual_ranks=4",
    "model.dropout=0.1",
    "run.steps=120",
    "eval.every=40",
    "checkpoint.every=20",
    "checkpoint.keep=9",
    "parameter_server.timeout=3",
];

/// A run of elastic processes.
pub struct Job {
    run: Run,
    servers: usize,
    workers: usize,
    pub coordinator: Running,
    others: Vec<Running>,
}

impl Job {
    /// Starts a coordinator, `servers` servers and `workers` workers.
    pub fn begin(
        root: &Path,
        name: &str,
        servers: usize,
        workers: usize,
        settings: &[&str],
    ) -> Self {
        let run = Run::new(Alone, root, name, &[&SETTINGS[..], settings].concat());
        let coordinator = start(&mut Self::coordinate(&run, servers, workers));
        let mut job = Self { run, servers, workers, coordinator, others: vec![] };
        (0..servers).for_each(|_| job.join("server"));
        (0..workers).for_each(|_| job.join("worker"));
        job
    }

    fn coordinate(run: &Run, servers: usize, workers: usize) -> Command {
        let arguments = run.command();
        let counts = ["--servers", &servers.to_string(), "--workers", &workers.max(1).to_string()]
            .map(String::from);
        let mut command = program(["ps", "coordinator"]);
        command.args(arguments.get_args().skip(1)).args(counts);
        command
    }

    /// Starts another process of a role, which is appended to `others`.
    fn join(&mut self, role: &str) {
        let run = self.files().0;
        let process = start_without_waiting(
            &self.coordinator,
            program(["ps", role, "--timeout", "10", "--run"]).arg(run),
        );
        self.others.push(process);
    }

    /// Kills and restarts the coordinator.
    fn restart(&mut self) {
        kill(self.coordinator.id());
        while self.coordinator.runs() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let run = self.run.clone().resume("auto");
        let again = start_without_waiting(
            &self.others[0],
            &mut Self::coordinate(&run, self.servers, self.workers),
        );
        self.coordinator = again;
    }

    /// Kills a server or worker, and starts another one of its role.
    fn replace(&mut self, number: usize, role: &str) {
        kill(self.others[number].id());
        drop(self.others.remove(number));
        self.join(role);
        let last = self.others.len() - 1;
        // The new process replaces the killed one in `others`.
        self.others[number..=last].rotate_right(1);
    }

    /// Runs another program to its end, without waiting for free cores, which could deadlock with
    /// another test.
    #[track_caller]
    pub fn run_alongside(&self, command: &mut Command) -> Ended {
        start_without_waiting(&self.coordinator, command).finish(LIMIT)
    }

    pub fn files(&self) -> RunFiles {
        self.run.files()
    }

    /// Waits until `step` steps are recorded.
    pub fn until_step(&mut self, steps: usize) {
        let path = self.files().path("metrics.jsonl");
        self.coordinator.until("so far", || lines(&path) >= steps);
    }

    /// Panics unless all processes end successfully.
    #[track_caller]
    pub fn ends(self) -> RunFiles {
        let files = self.files();
        self.coordinator.finish(LIMIT).succeeded();
        self.others.into_iter().for_each(|other| drop(other.finish(LIMIT).succeeded()));
        files
    }
}

/// Cuts all connections of a process, even within a message, and returns their number. The process
/// and its listeners continue. Returns none if the system forbids it.
fn cut(process: u32) -> Option<usize> {
    let pid = Pid::from_raw(process.cast_signed()).unwrap();
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let mut count = 0;
    for entry in std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten() {
        let number = entry.file_name().to_str().unwrap().parse().unwrap();
        let is_socket = |link: PathBuf| link.to_string_lossy().starts_with("socket:");
        // The connection may already be closed.
        if std::fs::read_link(entry.path()).is_ok_and(is_socket) {
            match pidfd_getfd(&descriptor, number, PidfdGetfdFlags::empty()) {
                Ok(socket) => {
                    let stream = TcpStream::from(socket);
                    count += usize::from(
                        stream.peer_addr().is_ok() && stream.shutdown(Shutdown::Both).is_ok(),
                    );
                }
                Err(Errno::PERM | Errno::NOSYS) => return None,
                Err(_) => {}
            }
        }
    }
    Some(count)
}

/// Returns an undisturbed run.
fn reference() -> RunFiles {
    Run::new(Simulate(2), Path::new(""), "", &SETTINGS[..7]).shared()
}

/// Processes that come after the end of a finished run, and a coordinator that resumes it, end at
/// once.
#[test]
fn late_processes_of_a_finished_run_end() {
    let root = tempfile::tempdir().unwrap();
    let small = ["run.steps=4", "eval.every=0", "device.memory=0.5"];
    let mut job = Job::begin(root.path(), "finished", 1, 1, &small);
    let worker = job.others.pop().unwrap();
    let files = job.files();
    let run = job.run.clone();
    job.ends();
    let ended = worker.finish(LIMIT).succeeded();
    let warning = "device.memory has no effect on CPUs";
    assert_eq!(ended.stderr.matches(warning).count(), 1, "{ended}");
    for role in ["worker", "server"] {
        let late = start(program(["ps", role, "--timeout", "150", "--run"]).arg(&files.0));
        let ended = late.finish(Duration::from_secs(60)).succeeded();
        assert!(ended.stdout.contains("finished has ended"), "{role}: {ended}");
    }
    let end = json(&files.path("END"));
    // No server is there.
    let mut again = Job::coordinate(&run.resume("auto"), 1, 1);
    let ended = start(&mut again).finish(LIMIT).succeeded();
    assert!(ended.stdout.contains("the run has ended: all 4 steps are done"), "{ended}");
    assert_eq!(json(&files.path("END")), end);
}

/// The error of a run whose server is not replaced names the server.
#[test]
fn a_server_that_does_not_come_back_is_named() {
    let root = tempfile::tempdir().unwrap();
    let settings = ["run.steps=100000", "checkpoint.every=10"];
    let mut job = Job::begin(root.path(), "lost", 1, 1, &settings);
    job.until_step(5);
    let status = job.run_alongside(program(["ps", "status", "--json", "--run"]).arg(job.files().0));
    let status: serde_json::Value = serde_json::from_str(&status.succeeded().stdout).unwrap();
    let address = status["servers"][0]["address"].as_str().unwrap().to_owned();
    let files = job.files();
    kill(job.others.remove(0).id());
    let ended = job.coordinator.finish(LIMIT);
    let lost = format!("a server was lost ({address}: ");
    assert_eq!(ended.code(), 1, "{ended}");
    for words in [&lost, "0 of 1 servers joined within 3 s", "hint:"] {
        assert!(ended.stderr.contains(words), "{words:?} is missing: {ended}");
    }
    let end = json(&files.path("END"));
    assert!(end["reason"].as_str().unwrap().contains(&lost), "{end}");
}

/// A job that is asked to end before its servers have joined exits as preempted.
#[test]
fn a_coordinator_without_servers_ends_when_it_is_asked_to() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &SETTINGS);
    let files = run.files();
    let mut coordinator = start(&mut Job::coordinate(&run, 1, 1));
    coordinator.until("listening", || files.path("servers/coordinator").exists());
    send(coordinator.id(), libc::SIGTERM);
    let ended = coordinator.finish(LIMIT);
    assert_eq!(ended.code(), 75, "{ended}");
    let end = json(&files.path("END"));
    assert_eq!((&end["status"], &end["step"]), (&"preempted".into(), &0.into()), "{end}");
    assert!(
        end["reason"].as_str().unwrap().contains("SIGTERM arrived before all servers"),
        "{end}"
    );
}

#[test]
fn deaths_change_no_bit() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    // The first two of the others are servers, the next two workers.
    let mut job = Job::begin(root.path(), "disturbed", 2, 2, &[]);

    job.until_step(10);
    kill(job.others[2].id());
    drop(job.others.remove(2));
    job.join("worker");

    job.until_step(30);
    // Its virtual ranks are reassigned; when it continues, it must join again.
    let stopped = job.others[2].id();
    send(stopped, libc::SIGSTOP);
    job.until_step(40);
    send(stopped, libc::SIGCONT);

    job.until_step(50);
    kill(job.others[0].id());
    drop(job.others.remove(0));
    job.join("server");

    job.until_step(70);
    job.restart();

    job.until_step(90);
    let leaves = job.others.remove(1);
    send(leaves.id(), libc::SIGTERM);
    leaves.finish(LIMIT).succeeded();

    let files = job.ends();
    files.same_as(&reference, 120, "disturbed");
}

#[test]
fn asynchronous_workers_come_and_go() {
    let root = tempfile::tempdir().unwrap();
    let asynchronous = [
        "parameter_server.staleness='none'",
        "parameter_server.batches_per_lease=8",
        "run.steps=150",
    ];
    let mut job = Job::begin(root.path(), "apart", 1, 2, &asynchronous);
    job.until_step(10);
    job.join("worker");
    job.until_step(30);
    kill(job.others[1].id());
    drop(job.others.remove(1));
    job.until_step(60);
    let stopped = job.others[1].id();
    send(stopped, libc::SIGSTOP);
    job.until_step(90);
    send(stopped, libc::SIGCONT);
    let files = job.ends();
    let manifest = json(&files.path("checkpoints/latest/manifest.json"));
    // Two workers' batches of four samples a step, each at least once.
    assert_eq!((&manifest["step"], &manifest["position"]), (&150.into(), &(150 * 8).into()));
}

#[test]
fn connections_that_are_cut_are_made_again() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    let mut job = Job::begin(
        root.path(),
        "cut",
        2,
        2,
        &["checkpoint.every=0", "parameter_server.timeout=20"],
    );
    for at in (10..110).step_by(10) {
        job.until_step(at);
        let process = job.others.get(at / 10 % 5).map_or(job.coordinator.id(), Running::id);
        let Some(count) = cut(process) else {
            eprintln!("SKIPPED: this system lets no process cut another's connections");
            break;
        };
        assert!(count > 0, "nothing to cut");
    }
    let log = job.files().path("logs/coordinator.log");
    job.ends().same_as(&reference, 120, "cut");
    // The run did not restart: there is no checkpoint from which it could.
    let log = std::fs::read_to_string(log).unwrap();
    assert!(!log.contains("a server was lost"), "{log}");
}

#[test]
fn a_restarted_coordinator_resumes_where_it_was() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    // No checkpoint exists to fall back to.
    let mut job = Job::begin(
        root.path(),
        "restarted",
        2,
        2,
        &["checkpoint.every=0", "parameter_server.timeout=20"],
    );
    for at in [1, 37, 80] {
        job.until_step(at);
        job.restart();
    }
    let files = job.ends();
    files.same_as(&reference, 120, "restarted");
    assert_eq!(resumptions(&files), 3);
    // If a server has lost its ranges as well, the run restarts from the last checkpoint.
    let mut job = Job::begin(root.path(), "both", 2, 2, &[]);
    job.until_step(50);
    kill(job.others[0].id());
    drop(job.others.remove(0));
    job.restart();
    job.join("server");
    let files = job.ends();
    files.same_as(&reference, 120, "both");
    assert_eq!(resumptions(&files), 0);
}

/// Returns how often a coordinator resumed with servers that still held their state.
fn resumptions(files: &RunFiles) -> usize {
    files.text("logs/coordinator.log").matches("with servers that still hold its state").count()
}

#[test]
fn asynchronous_workers_outlive_a_coordinator() {
    let root = tempfile::tempdir().unwrap();
    let asynchronous = [
        "parameter_server.staleness='none'",
        "parameter_server.batches_per_lease=8",
        "run.steps=150",
        "checkpoint.every=0",
        "eval.every=0",
    ];
    let mut job = Job::begin(root.path(), "apart", 2, 2, &asynchronous);
    for at in [20, 70] {
        job.until_step(at);
        job.restart();
    }
    let files = job.ends();
    let manifest = json(&files.path("checkpoints/latest/manifest.json"));
    assert_eq!((&manifest["step"], &manifest["position"]), (&150.into(), &(150 * 8).into()));
    let steps: Vec<u64> = files.text("metrics.jsonl").lines().map(step_of).collect();
    assert_eq!(steps, (1..=150).collect::<Vec<_>>());
    assert_eq!(resumptions(&files), 2);
    // Every batch counts, and those done since the last recorded step may count twice.
    let updates = manifest["updates"].as_u64().unwrap();
    assert!((300..330).contains(&updates), "{updates} updates");
}

/// Returns the step of a line of records.
fn step_of(line: &str) -> u64 {
    serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap()
}

#[test]
fn a_run_that_is_asked_to_end_saves_and_goes_on() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    let mut job = Job::begin(root.path(), "interrupted", 1, 2, &[]);
    job.until_step(25);
    send(job.coordinator.id(), libc::SIGTERM);
    let files = job.files();
    assert_eq!(job.coordinator.finish(LIMIT).code(), 75);
    // Servers exit successfully; workers exit as preempted.
    let codes: Vec<i32> = job.others.into_iter().map(|other| other.finish(LIMIT).code()).collect();
    assert_eq!(codes, [0, 75, 75]);
    assert_eq!(json(&files.path("END"))["status"], "preempted");
    // Resume without servers from their checkpoint.
    let run = Run::new(Simulate(4), root.path(), "interrupted", &SETTINGS[..7]).resume("auto");
    run.succeeds().same_as(&reference, 120, "interrupted");
}

#[test]
fn strangers_do_not_disturb_a_run() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    let mut job = Job::begin(
        root.path(),
        "visited",
        1,
        1,
        &["parameter_server.address='127.0.0.1'", "parameter_server.timeout=60"],
    );
    job.until_step(5);
    // The run lasts as long as the connections below.
    let worker = job.others[1].id();
    send(worker, libc::SIGSTOP);
    let address = job.files().coordinator();
    let connect = || TcpStream::connect(&address).unwrap();
    // These connections send nothing.
    let silent: Vec<TcpStream> = (0..300).map(|_| connect()).collect();
    let long = [&b"hpctrain"[..], &2u32.to_le_bytes(), &[7; 32], &[9; 16], &[0xff; 12]].concat();
    for words in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &long] {
        let mut stranger = connect();
        let _ = stranger.write_all(words);
        stranger.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut answer = Vec::new();
        // The server sends at most its opening, then closes the connection.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.len() <= 12, "{} bytes", answer.len());
    }
    let secret = std::fs::metadata(job.files().path("servers/secret")).unwrap();
    assert_eq!(secret.permissions().mode() & 0o777, 0o600);
    let status = job
        .run_alongside(program(["ps", "status", "--json", "--run"]).arg(job.files().0))
        .succeeded();
    let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
    assert_eq!(status["workers"].as_array().map(Vec::len), Some(1), "{status}");
    assert!(status["servers"][0]["load"]["pushes"].as_u64().unwrap() > 0, "{status}");
    send(worker, libc::SIGCONT);
    job.ends().same_as(&reference, 120, "visited");
    drop(silent);
}

/// Connections to some addresses that slowly send bytes of a handshake, until this is dropped.
struct Dribblers {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Dribblers {
    fn start(addresses: &[String], of_each: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let ends = over.clone();
        let addresses = addresses.to_vec();
        let dribble = move || {
            let all = addresses.iter().flat_map(|address| std::iter::repeat_n(address, of_each));
            let connect = |address: &String| TcpStream::connect(address).ok();
            let mut streams: Vec<(&String, Option<TcpStream>)> =
                all.map(|address| (address, None)).collect();
            let mut byte = b"hpctrain".iter().cycle();
            while !ends.load(Ordering::Relaxed) {
                let byte = *byte.next().unwrap();
                for (address, stream) in &mut streams {
                    if stream.as_mut().is_none_or(|stream| stream.write_all(&[byte]).is_err()) {
                        *stream = connect(address);
                    }
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        };
        Self { over, thread: Some(std::thread::spawn(dribble)) }
    }
}

impl Drop for Dribblers {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

/// Slow connections do not block those that saves need, and change nothing.
#[test]
fn connections_that_dribble_do_not_roll_a_run_back() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    let mut job = Job::begin(root.path(), "dribbled", 1, 2, &[]);
    job.until_step(5);
    let status = job
        .run_alongside(program(["ps", "status", "--json", "--run"]).arg(job.files().0))
        .succeeded();
    let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
    let server = status["servers"][0]["address"].as_str().unwrap().to_string();
    // The run does not end before the first connections are refused.
    let worker = job.others[1].id();
    send(worker, libc::SIGSTOP);
    let dribblers = Dribblers::start(&[server, job.files().coordinator()], 200);
    let log = job.files().path("logs/coordinator.log");
    let refused = || std::fs::read_to_string(&log).is_ok_and(|log| log.contains("refused"));
    job.coordinator.until("a connection is refused", refused);
    send(worker, libc::SIGCONT);
    let files = job.ends();
    drop(dribblers);
    files.same_as(&reference, 120, "dribbled");
    let log = files.text("logs/coordinator.log");
    assert!(!log.contains("a server was lost"), "{log}");
    // Refused callers are reported, but not every one.
    assert_eq!(log.matches("refused").count(), 1, "{log}");
}

/// Returns the addresses of servers that the coordinator prints at each start of a generation.
fn server_addresses(printed: &str) -> Vec<&str> {
    printed
        .lines()
        .filter_map(|line| line.strip_prefix("servers ")?.rsplit_once(" on "))
        .map(|(_, on)| on)
        .collect()
}

#[test]
fn a_server_that_hangs_gives_its_place_to_the_spare_one() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    let mut job = Job::begin(root.path(), "hangs", 1, 2, &[]);
    job.until_step(30);
    let hangs = job.others[0].id();
    send(hangs, libc::SIGSTOP);
    job.join("server");
    job.until_step(110);
    send(hangs, libc::SIGCONT);
    let files = job.files();
    let ended = job.coordinator.finish(LIMIT).succeeded();
    job.others.into_iter().for_each(|other| drop(other.finish(LIMIT).succeeded()));
    files.same_as(&reference, 120, "hangs");
    let log = files.text("logs/coordinator.log");
    assert_eq!(log.matches("a server was lost").count(), 1, "{log}");
    assert!(log.contains("no heartbeat for 3 s"), "{log}");
    // The spare server replaced it at once.
    let on = server_addresses(&ended.stdout);
    assert!(on.len() == 2 && on[0] != on[1], "{ended}");
}

#[test]
fn without_the_secret_nobody_is_let_in() {
    let root = tempfile::tempdir().unwrap();
    let mut job = Job::begin(root.path(), "picky", 1, 1, &["parameter_server.timeout=60"]);
    job.until_step(5);
    let worker = job.others[1].id();
    send(worker, libc::SIGSTOP);
    // A worker that cannot read the secret is refused.
    let files = job.files();
    let other = root.path().join("copy/servers");
    std::fs::create_dir_all(&other).unwrap();
    std::fs::copy(files.path("servers/coordinator"), other.join("coordinator")).unwrap();
    let without = job.run_alongside(
        program(["ps", "worker", "--timeout", "1", "--run"]).arg(root.path().join("copy")),
    );
    refused(&without, &["cannot read", "secret"]);
    std::fs::write(other.join("secret"), [7; 32]).unwrap();
    let open = job.run_alongside(
        program(["ps", "worker", "--timeout", "1", "--run"]).arg(root.path().join("copy")),
    );
    refused(&open, &["servers/secret has mode 644", "chmod 600"]);
    std::fs::set_permissions(other.join("secret"), Permissions::from_mode(0o600)).unwrap();
    let wrong = job.run_alongside(
        program(["ps", "worker", "--timeout", "1", "--run"]).arg(root.path().join("copy")),
    );
    assert_eq!(wrong.code(), 1, "{wrong}");
    assert!(wrong.stderr.contains("does not know this run's secret"), "{wrong}");
    let nobody = job.run_alongside(
        program(["ps", "server", "--timeout", "1", "--run"]).arg(root.path().join("nothing")),
    );
    assert!(nobody.stderr.contains("hpctrain ps coordinator"), "{nobody}");
    send(worker, libc::SIGCONT);
    job.ends();
}

#[test]
fn a_worker_with_other_data_is_sent_away() {
    let root = tempfile::tempdir().unwrap();
    let data = root.path().join("data");
    let import = |text: &str| {
        let file = root.path().join("text");
        std::fs::write(&file, text.repeat(400)).unwrap();
        let _ = std::fs::remove_dir_all(&data);
        let mut command = program(["data", "import", "text", "--tokenizer", "char", "--out"]);
        command.arg(&data).arg(&file);
        command
    };
    finish(&mut import("to be or not to be")).succeeded();
    let path = format!("data.path={}", data.display());
    let settings = [
        path.as_str(),
        "parameter_server.timeout=10",
        "run.steps=8",
        "eval.every=0",
        "checkpoint.every=0",
    ];
    let mut job = Job::begin(root.path(), "picky", 1, 0, &settings);
    let address = job.files().path("servers/coordinator");
    job.coordinator.until("there", || address.exists());
    job.run_alongside(&mut import("or not to be to be")).succeeded();
    let other =
        job.run_alongside(program(["ps", "worker", "--timeout", "20", "--run"]).arg(job.files().0));
    refused(&other, &["the training data of this worker differs from that of the run"]);
    job.run_alongside(&mut import("to be or not to be")).succeeded();
    job.join("worker");
    job.ends();
}

#[test]
fn roles_by_variables_make_a_run() {
    let root = tempfile::tempdir().unwrap();
    let reference = reference();
    let port =
        || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let chief = port();
    let ps = port();
    let chiefless = port();
    let workers = r#""worker": ["a:1", "b:1"]"#;
    let clusters = [
        format!(r#"{{"chief": ["{chief}"], "ps": ["{ps}"], {workers}}}"#),
        format!(r#"{{"ps": ["{chiefless}"], {workers}}}"#),
    ];
    let tf = |cluster: usize, kind: &str, index: usize| {
        let task = format!(r#"{{"type": "{kind}", "index": {index}}}"#);
        let cluster = &clusters[cluster];
        vec![("TF_CONFIG", format!(r#"{{"cluster": {cluster}, "task": {task}}}"#))]
    };
    let torch = |rank: usize| {
        let numbers = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", "4".into()),
            ("MASTER_ADDR", "127.0.0.1".into()),
        ];
        numbers.to_vec()
    };
    let of_torch = (0..4).map(torch).collect();
    for (name, tasks) in [
        ("tf", vec![tf(0, "chief", 0), tf(0, "ps", 0), tf(0, "worker", 0), tf(0, "worker", 1)]),
        ("chiefless", vec![tf(1, "ps", 0), tf(1, "worker", 0), tf(1, "worker", 1)]),
        ("torch", of_torch),
    ] {
        let run = Run::new(Alone, root.path(), name, &SETTINGS);
        let command = |variables: &Vec<(&str, String)>| {
            let mut command = program(["ps", "auto", "--servers", "1"]);
            command.args(run.command().get_args().skip(1)).envs(variables.iter().cloned());
            command
        };
        let coordinator = start(&mut command(&tasks[0]));
        let others: Vec<Running> = tasks[1..]
            .iter()
            .map(|task| start_without_waiting(&coordinator, &mut command(task)))
            .collect();
        let ended = coordinator.finish(LIMIT).succeeded();
        others.into_iter().for_each(|other| drop(other.finish(LIMIT).succeeded()));
        run.files().same_as(&reference, 120, name);
        if name == "tf" {
            assert_eq!(run.files().coordinator(), chief);
        }
        if name == "chiefless" {
            assert_eq!(run.files().coordinator(), chiefless);
            assert!(ended.stdout.contains("ps 0 coordinates the run and serves, too"), "{ended}");
        }
    }
}

/// The roles of the manifest of a TFJob, each a process with the `TF_CONFIG` that the operator sets, and
/// with the manifest's arguments.
#[test]
fn the_manifest_of_a_tfjob_trains() {
    let shared = tempfile::tempdir().unwrap();
    let path = hpctrain_testkit::root().join("packaging/kubernetes/tfjob.yaml");
    let manifest = std::fs::read_to_string(path).unwrap();
    let (_, arguments) = manifest.split_once("args: &arguments\n").unwrap();
    let arguments: Vec<String> = arguments
        .lines()
        .map_while(|line| line.trim().strip_prefix("- "))
        .map(|word| word.replace("/shared", &shared.path().display().to_string()))
        .collect();
    assert_eq!(arguments[..2], ["ps", "auto"]);
    let replicas = |kind: &str| -> usize {
        let (_, after) = manifest.split_once(&format!("    {kind}:\n")).unwrap();
        let (_, count) = after.split_once("replicas: ").unwrap();
        count.lines().next().unwrap().parse().unwrap()
    };
    let kinds =
        [("chief", "Chief"), ("ps", "PS"), ("worker", "Worker"), ("evaluator", "Evaluator")];
    let tasks =
        || kinds.into_iter().flat_map(|(role, kind)| (0..replicas(kind)).map(move |i| (role, i)));
    assert_eq!(tasks().count(), 1 + 2 + 4 + 1);
    let port =
        || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    // Training operators do not list evaluators in the cluster.
    let cluster: serde_json::Value = kinds[..3]
        .iter()
        .map(|(role, kind)| {
            let addresses = (0..replicas(kind)).map(|_| port()).collect::<Vec<_>>();
            ((*role).to_owned(), addresses.into())
        })
        .collect::<serde_json::Map<_, _>>()
        .into();
    let settings: Vec<&str> = SETTINGS
        .into_iter()
        .filter(|setting| !setting.starts_with("parameter_server."))
        .chain(["eval.inline=false", "checkpoint.every=40"])
        .collect();
    let run = Run::new(Alone, &shared.path().join("runs"), "x", &settings);
    let shown = finish(program(["config", "show"]).args(run.command().get_args().skip(1)));
    std::fs::write(shared.path().join("my.toml"), &shown.succeeded().stdout).unwrap();
    let command = |(role, index): (&str, usize)| {
        let config =
            serde_json::json!({"cluster": cluster, "task": {"type": role, "index": index}});
        let mut command = program(&arguments);
        command.env("TF_CONFIG", config.to_string());
        command
    };
    let mut tasks = tasks();
    let chief = start(&mut command(tasks.next().unwrap()));
    let others: Vec<Running> =
        tasks.map(|task| start_without_waiting(&chief, &mut command(task))).collect();
    chief.finish(LIMIT).succeeded();
    others.into_iter().for_each(|other| drop(other.finish(LIMIT).succeeded()));
    let reference = Run::new(Alone, shared.path(), "reference", &settings).succeeds();
    assert_eq!(run.files().steps(), reference.steps());
    assert_eq!(run.files().tensors(120), reference.tensors(120));
    assert_eq!(run.files().numbers("eval.jsonl", "step"), [40.0, 80.0, 120.0]);
}

/// The evaluator starts first, where no directory of runs exists yet.
#[test]
fn an_evaluator_by_variables_leaves_no_step_to_the_coordinator() {
    let root = tempfile::tempdir().unwrap();
    let port =
        || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let cluster = format!(
        r#"{{"chief": ["{}"], "ps": ["{}"], "worker": ["a:1"], "evaluator": ["b:1"]}}"#,
        port(),
        port()
    );
    let settings = ["run.steps=60", "eval.every=20", "eval.samples=40"];
    let run = Run::new(Alone, &root.path().join("new"), "x", &[&SETTINGS[..], &settings].concat());
    let command = |kind: &str, more: &[&str]| {
        let task = format!(r#"{{"type": "{kind}", "index": 0}}"#);
        let mut command = program(["ps", "auto", "--policy", "every"]);
        command.args(run.command().get_args().skip(1)).args(more);
        command.env("TF_CONFIG", format!(r#"{{"cluster": {cluster}, "task": {task}}}"#));
        command
    };
    let mut evaluator = start(&mut command("evaluator", &[]));
    while !evaluator
        .printed()
        .contains("x is not the directory of a run yet: waiting 1800 s for its trainer")
    {
        assert!(evaluator.runs(), "{}", evaluator.printed());
        std::thread::sleep(Duration::from_millis(10));
    }
    let others = ["chief", "ps", "worker"]
        .map(|kind| start_without_waiting(&evaluator, &mut command(kind, &[])));
    let [chief, others @ ..] = others.map(|process| process.finish(LIMIT).succeeded());
    drop(others);
    assert!(chief.stdout.contains("cluster.evaluator evaluates: eval.inline = false"), "{chief}");
    evaluator.finish(LIMIT).succeeded();
    let files = run.files();
    assert_eq!(files.numbers("eval.jsonl", "step"), [20.0, 40.0, 60.0]);
    let lines = files.text("eval.jsonl");
    assert!(lines.lines().all(|line| line.contains("\"checkpoint\":\"step-")), "{lines}");

    // Its own settings have an effect: the device, and those of early stopping.
    let ended = finish(&mut command("evaluator", &["--set", "run.device=cuda:63"]));
    refused(&ended, &["run.device = cuda:63"]);
    std::fs::remove_file(files.path("eval.jsonl")).unwrap();
    let stops = ["--set", "eval.patience=1", "--set", "eval.min_delta=100.0"];
    finish(&mut command("evaluator", &stops)).succeeded();
    let asked = files.text("STOP");
    assert!(asked.starts_with("no validation loss lower than "), "{asked}");
    // Without an evaluator there is nothing to choose.
    let mut without = command("chief", &[]);
    without.env_remove("TF_CONFIG").envs([("RANK", "0"), ("WORLD_SIZE", "3")]);
    refused(&finish(&mut without), &["--policy, but without TF_CONFIG"]);
}

/// Injects six faults, or `HPCTRAIN_FAULT_RUNS`.
#[test]
fn faults_again_and_again_change_no_bit() {
    let faults = std::env::var("HPCTRAIN_FAULT_RUNS").map_or(6, |number| number.parse().unwrap());
    let root = tempfile::tempdir().unwrap();
    let steps = ["run.steps=240", "checkpoint.every=20", "eval.every=80"];
    let whole =
        Run::new(Simulate(2), root.path(), "whole", &[&SETTINGS[..7], &steps].concat()).succeeds();
    let mut dice = Dice(0x5eed5);
    let mut done = 0;
    while done < faults {
        let name = format!("run-{done}");
        // Two servers, then two workers.
        let mut job = Job::begin(root.path(), &name, 2, 2, &steps);
        let mut history = String::new();
        for _ in 0..8 {
            let at = lines(&job.files().path("metrics.jsonl")) + 1 + dice.below(25) as usize;
            if done == faults || at > 220 {
                break;
            }
            job.until_step(at);
            let fault = dice.below(8);
            history += &format!("{fault} at {at}; ");
            match fault {
                0 | 1 => job.replace(fault as usize, "server"),
                2 | 3 => job.replace(fault as usize, "worker"),
                4 => job.restart(),
                7 => {
                    let process = job
                        .others
                        .get(dice.below(5) as usize)
                        .map_or(job.coordinator.id(), Running::id);
                    let _ = cut(process);
                }
                5 => {
                    // It is stopped for longer than the timeout.
                    send(job.others[2].id(), libc::SIGSTOP);
                    std::thread::sleep(Duration::from_millis(3500));
                    send(job.others[2].id(), libc::SIGCONT);
                }
                _ => {
                    send(job.others[1].id(), libc::SIGSTOP);
                    std::thread::sleep(Duration::from_millis(700));
                    send(job.others[1].id(), libc::SIGCONT);
                }
            }
            done += 1;
        }
        let files = job.ends();
        println!("{name}: {history}");
        files.same_as(&whole, 240, &name);
        assert!(!saves(&files), "{name}: leftovers");
    }
}
