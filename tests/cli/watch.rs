//! `hpctrain watch` on a pseudo-terminal, whose screen the crate `vt100` keeps.

use std::fs::File;
use std::io::Read as _;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use hpctrain_testkit::launch::Transport::{Alone, Mpirun};
use hpctrain_testkit::launch::{LIMIT, finish, in_our_environment, program, send, start};
use hpctrain_testkit::runs::Run;

/// A program on a pseudo-terminal of its own.
struct OnTerminal {
    child: Child,
    /// The side of the keyboard and the display.
    master: OwnedFd,
    /// The side of the program, which keeps the terminal open after its end.
    slave: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
}

fn window(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}

fn cells(count: u16) -> NonZero<u16> {
    NonZero::new(count).unwrap()
}

impl OnTerminal {
    /// Starts `hpctrain watch` for a run on a terminal of this size.
    fn watch(run: &Path, columns: u16, rows: u16) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, vec![]).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = open(name, flags, Mode::empty()).unwrap();
        tcsetwinsize(&master, window(columns, rows)).unwrap();
        // The terminal becomes the one that controls the program: it sends the signal of a resize.
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(hpctrain_testkit::program());
        command.args(["watch", "--interval", "200ms"]).arg(run);
        in_our_environment(&mut command);
        command.envs([("TERM", "xterm-256color"), ("LC_ALL", "C.UTF-8")]);
        let side = || slave.try_clone().unwrap();
        let child = command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(cells(rows), cells(columns), 0)));
        let mut output = File::from(master.try_clone().unwrap());
        let parser = screen.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                parser.lock().unwrap().process(&bytes[..read]);
            }
        });
        Self { child, master, slave, screen }
    }

    fn contents(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// Waits until the screen has all these words.
    #[track_caller]
    fn until(&self, words: &[&str]) -> String {
        let begun = Instant::now();
        loop {
            let contents = self.contents();
            if words.iter().all(|word| contents.contains(word)) {
                return contents;
            }
            assert!(begun.elapsed() < LIMIT, "no {words:?} on the screen:\n{contents}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn press(&self, keys: &str) {
        assert_eq!(rustix::io::write(&self.master, keys.as_bytes()).unwrap(), keys.len());
    }

    fn resize(&self, columns: u16, rows: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(cells(rows), cells(columns));
        tcsetwinsize(&self.master, window(columns, rows)).unwrap();
    }

    /// Waits for the end, after which the terminal is as before.
    #[track_caller]
    fn end(mut self) -> ExitStatus {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < LIMIT, "it does not end:\n{}", self.contents());
            std::thread::sleep(Duration::from_millis(10));
        };
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO), "{modes:?}");
        // Its last output may still be on its way.
        while self.screen.lock().unwrap().screen().alternate_screen() {
            assert!(begun.elapsed() < LIMIT, "the alternate screen stays");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!self.screen.lock().unwrap().screen().hide_cursor());
        status
    }
}

#[test]
fn a_run_is_watched_while_it_trains_and_afterwards() {
    let root = tempfile::tempdir().unwrap();
    let settings = [
        "run.steps=100000000",
        "eval.every=5",
        "checkpoint.every=5",
        "log.straggler_window=5",
        "parallel.virtual_ranks=2",
    ];
    let run = Run::new(Mpirun(2), root.path(), "watched", &settings);
    let files = run.files();
    let mut job = start(&mut run.command());
    job.until("its first steps", || {
        let times = std::fs::read_to_string(files.path("rank_times.jsonl"));
        times.is_ok_and(|times| times.ends_with('\n'))
    });

    let watch = OnTerminal::watch(&files.path(""), 80, 24);
    let first = watch.until(&["watched  running", "of 100,000,000", "training loss", "q quit"]);
    assert!(first.contains("ETA ") && first.contains("2 ranks, slowest rank "), "{first}");
    let step = |screen: &str| {
        let text = screen.split_once("step ").unwrap().1.split_once(" of").unwrap().0;
        text.replace(',', "").parse::<u64>().unwrap()
    };
    let begun = Instant::now();
    while step(&watch.contents()) <= step(&first) {
        assert!(begun.elapsed() < LIMIT, "no further step:\n{}", watch.contents());
        std::thread::sleep(Duration::from_millis(20));
    }
    watch.until(&["evaluated", " kept, latest ", "lowest "]);
    watch.press("6");
    watch.until(&["compute time of 2 ranks, slowest first"]);
    watch.press("4");
    watch.until(&["gradient norm"]);
    watch.press("7");
    watch.until(&["log of rank-0000", "rank "]);
    watch.press("1z");
    watch.resize(120, 40);
    let wide = watch.until(&["training loss", "q quit"]);
    assert!(wide.lines().any(|line| line.chars().count() > 100), "{wide}");

    // It keeps its screen when the run ends.
    send(job.id(), libc::SIGTERM);
    job.finish(LIMIT);
    let ended = watch.until(&["preempted: "]);
    assert!(!ended.contains("ETA "), "{ended}");
    watch.press("q");
    assert!(watch.end().success());

    let after = OnTerminal::watch(&files.path(""), 80, 24);
    after.until(&["preempted: ", "training loss"]);
    send(after.child.id(), libc::SIGTERM);
    assert!(after.end().success());
}

#[test]
fn one_screen_is_printed() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "once", &["eval.every=2"]).succeeds();
    let run = run.path("");
    let run = run.to_str().unwrap();
    let once = |more: &[&str]| {
        let mut command = program([&["watch", run, "--once"], more].concat());
        finish(command.env("LC_ALL", "C.UTF-8")).succeeded().stdout
    };
    let screen = once(&[]);
    for words in ["once  finished", "100.0 %", "training loss", "checkpoints ", "evaluation "] {
        assert!(screen.contains(words), "{screen}");
    }
    assert_eq!(screen.lines().count(), 24, "{screen}");
    assert_eq!(once(&["--size", "100x30", "--panel", "7"]).lines().count(), 30);
    let ascii = finish(program(["watch", run, "--once"]).env("LC_ALL", "C")).succeeded().stdout;
    assert!(ascii.is_ascii() && ascii.contains("training loss"), "{ascii}");
}

#[test]
fn what_cannot_be_watched_is_named() {
    let root = tempfile::tempdir().unwrap();
    let run = Run::new(Alone, root.path(), "x", &[]).succeeds();
    let (run, root) = (run.path(""), root.path().to_str().unwrap());
    let run = run.to_str().unwrap();
    for (args, words, hint) in [
        (&["watch", run][..], "watch needs a terminal", "--once"),
        (&["watch", root], "is not a run, but contains runs", "give one of them"),
        (&["watch", "nowhere"], "nowhere: there is no such directory", "give the directory"),
        (&["watch", run, "--interval", "0"], "--interval is less than 100 ms", "such as 1s"),
        (&["watch", run, "--once", "--size", "80"], "COLUMNSxROWS", "80x24"),
    ] {
        let ended = finish(&mut program(args));
        assert_eq!(ended.code(), 2, "{ended}");
        assert!(ended.stderr.contains(words) && ended.stderr.contains(hint), "{ended}");
    }
}
