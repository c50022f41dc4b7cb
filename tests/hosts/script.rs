//! `scripts/hosts` itself: what it creates ends with it, and sets of hosts are isolated.

use std::path::Path;
use std::process::Command;

use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::{LIMIT, start};

#[test]
fn hosts_end_with_their_processes() {
    let (Some(hosts), Some(others)) = (Hosts::new(2), Hosts::new(1)) else { return };
    // A number that no other process has in its command line.
    let time = format!("{}", 100_000_000 + u64::from(std::process::id()));
    let sleeper = start(&mut hosts.on("h1", Command::new("sleep").arg(&time)));
    let mut found = vec![];
    let begun = std::time::Instant::now();
    while found.is_empty() && begun.elapsed() < LIMIT {
        found = hosts.processes("h1", &time);
    }
    assert!(!found.is_empty() && hosts.processes("h0", &time).is_empty());
    let folder = hosts.folder();
    drop(hosts);
    assert!(!sleeper.finish(LIMIT).status.success());
    assert!(
        !folder.exists()
            && found.iter().all(|process| !Path::new(&format!("/proc/{process}")).exists())
    );
    assert_eq!(others.run_script(&["run", "h0", "hostname"]), "h0\n");
}

#[test]
fn a_cut_cable_and_a_lost_host_are_refused_by_the_agent() {
    let Some(hosts) = Hosts::new(2) else { return };
    let asked = || {
        hosts
            .script(&["run", "h0", "sh", "-c", &format!("{} h1 hostname", hosts.agent())])
            .output()
            .unwrap()
    };
    assert_eq!(asked().stdout, b"h1\n");
    hosts.run_script(&["cut", "h1"]);
    assert_eq!(asked().status.code(), Some(255));
    hosts.run_script(&["mend", "h1"]);
    assert!(asked().status.success());
    hosts.run_script(&["lose", "h1"]);
    assert_eq!(asked().status.code(), Some(255));
}
