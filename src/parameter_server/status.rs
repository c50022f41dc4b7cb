//! The status of a run with parameter servers, requested from its coordinator.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::protocol::{CoordinatorRequest, CoordinatorResponse};
use super::rendezvous::PsRendezvous;
use super::rpc_client::RpcClient;
use hpctrain_base::error::{Error, Result};
use hpctrain_config::telemetry::bytes;

/// The time in which the coordinator must answer.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Returns the status of a run as JSON.
///
/// # Errors
/// Returns an error if the run has no coordinator, or it does not answer.
pub fn status(site: &PsRendezvous) -> Result<Value> {
    let contact = site.coordinator(Duration::ZERO)?;
    let mut client =
        RpcClient::new("the coordinator", &contact.address, site.credentials(&contact)?, TIMEOUT);
    match client.call(&CoordinatorRequest::Status)? {
        CoordinatorResponse::Status(status) => Ok(*status),
        other => Err(Error::comm(format!("the coordinator answered {other:?}"))),
    }
}

/// The width of the first column of the tables, unless a name is longer.
const NAME_WIDTH: usize = 28;

/// Returns a number of a status, or 0 if it is missing.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

/// Returns a count of a status, or 0 if it is missing. A value of `serde_json` would be printed
/// without the width of its column.
fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// Returns the width of a column of the texts at `key` of `rows`.
fn name_width(rows: &Value, key: &str) -> usize {
    let names = rows.as_array().into_iter().flatten().filter_map(|row| row[key].as_str());
    names.map(|name| name.chars().count()).max().unwrap_or(0).max(NAME_WIDTH)
}

/// Describes the work of a lease, `{"batches": [41, 45]}` for example, as `batches 41..45`.
fn work_text(task: &Value) -> String {
    let (kind, range) = match task.as_object().and_then(|task| task.iter().next()) {
        Some((kind, range)) => (kind.replace('_', " "), range),
        None => return "?".into(),
    };
    format!("{kind} {}..{}", count(&range[0]), count(&range[1]))
}

/// Formats a status as text.
pub fn format_status(status: &Value) -> String {
    let mut text = String::new();
    let run = &status["run"];
    let _ = writeln!(
        text,
        "step {} of {}, loss {:.4}, {:.1} samples/s",
        run["step"],
        run["steps"],
        number(&run["loss"]),
        number(&run["samples_per_second"])
    );
    let width = name_width(&status["workers"], "place");
    let _ = writeln!(
        text,
        "\n{:<width$} {:>8} {:>8} {:>10} {:>8} {:>8} {:>8} {:>8}",
        "worker", "clock", "done", "computed", "loader", "pull", "push", "heard"
    );
    for worker in status["workers"].as_array().into_iter().flatten() {
        let place = worker["place"].as_str().unwrap_or("?");
        let [computed, loader, pull, push] =
            ["compute", "loader", "pull", "push"].map(|use_| number(&worker["seconds"][use_]));
        let _ = writeln!(
            text,
            "{place:<width$} {:>8} {:>8} {computed:>8.1} s {loader:>6.1} s {pull:>6.1} s {push:>6.1} s {:>6.1} s",
            count(&worker["clock"]),
            count(&worker["done"]),
            number(&worker["heard_seconds_ago"])
        );
    }
    let width = name_width(&status["servers"], "address");
    let _ = writeln!(
        text,
        "\n{:<width$} {:>7} {:>10} {:>8} {:>10} {:>8} {:>10} {:>8} {:>9}",
        "server", "ranges", "held", "pulls", "sent", "pushes", "received", "refused", "updating"
    );
    for server in status["servers"].as_array().into_iter().flatten() {
        let address = server["address"].as_str().unwrap_or("?");
        let load = &server["load"];
        if load.is_null() {
            let _ = writeln!(text, "{address:<width$} does not answer");
            continue;
        }
        let size = |key: &str| bytes(count(&load[key]) as usize);
        let _ = writeln!(
            text,
            "{address:<width$} {:>7} {:>10} {:>8} {:>10} {:>8} {:>10} {:>8} {:>7.1} s",
            count(&load["ranges"]),
            size("bytes"),
            count(&load["pulls"]),
            size("pulled"),
            count(&load["pushes"]),
            size("pushed"),
            count(&load["refused"]),
            number(&load["updating"]) / 1e6
        );
    }
    let staleness = status["staleness"].as_array().into_iter().flatten();
    let pairs: Vec<String> = staleness.map(|pair| format!("{}: {}", pair[0], pair[1])).collect();
    if !pairs.is_empty() {
        let _ = writeln!(text, "\nupdates between pull and push: {}", pairs.join(", "));
    }
    for lease in status["leases"].as_array().into_iter().flatten() {
        let _ = writeln!(
            text,
            "ticket {} of worker {}: {}",
            lease["ticket"],
            lease["worker"],
            work_text(&lease["task"])
        );
    }
    text.trim_end().into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the column at which each word of a line ends.
    fn ends(line: &str) -> Vec<usize> {
        let bytes = line.as_bytes();
        let is_end =
            |at: &usize| bytes[*at] != b' ' && bytes.get(at + 1).is_none_or(|c| *c == b' ');
        (0..bytes.len()).filter(is_end).collect()
    }

    #[test]
    fn columns_are_aligned() {
        let worker = |place: &str, clock: u64| {
            json!({"place": place, "clock": clock, "done": 3 * clock, "heard_seconds_ago": 0.25,
                "seconds": {"compute": 1.5, "loader": 0.0, "pull": 12.0, "push": 3.25}})
        };
        let load = json!({"ranges": 7, "bytes": 4 << 20, "pulls": 41, "pulled": 1 << 20,
            "pushes": 1234, "pushed": 99, "refused": 0, "updating": 2_500_000});
        let status = json!({
            "run": {"step": 41, "steps": 100, "loss": 1.5, "samples_per_second": 300.0},
            "workers": [worker("node7 (process 12)", 5), worker("node8 (process 13)", 41_000)],
            "servers": [
                {"address": "a-host-with-a-long-name.example.org:2222", "load": load},
                {"address": "b:1", "load": null},
            ],
            "staleness": [[0, 12], [1, 3]],
            "leases": [
                {"ticket": 9, "worker": 2, "task": {"batches": [41, 45]}},
                {"ticket": 10, "worker": 3, "task": {"virtual_ranks": [0, 2]}},
            ],
        });
        let text = format_status(&status);
        let lines: Vec<&str> = text.lines().collect();
        let at = |start: &str| lines.iter().position(|line| line.starts_with(start)).unwrap();
        let workers = at("worker");
        for row in &lines[workers + 1..=workers + 2] {
            // `clock` and `done` end where their numbers do.
            let header = ends(lines[workers]);
            assert!(header[1..3].iter().all(|end| ends(row).contains(end)), "{text}");
            assert_eq!(row.len(), lines[workers].len(), "{text}");
        }
        let servers = at("server");
        let header = ends(lines[servers]);
        let row = ends(lines[servers + 1]);
        // All but `server` itself, whose names are longer.
        assert!(header[1..].iter().all(|end| row.contains(end)), "{text}");
        assert!(lines[servers + 2].starts_with("b:1 "), "{text}");
        assert!(text.contains("ticket 9 of worker 2: batches 41..45\n"), "{text}");
        assert!(text.ends_with("ticket 10 of worker 3: virtual ranks 0..2"), "{text}");
    }
}
