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

/// Formats a status as text.
pub fn format_status(status: &Value) -> String {
    let mut text = String::new();
    let run = &status["run"];
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let _ = writeln!(
        text,
        "step {} of {}, loss {:.4}, {:.1} samples/s",
        run["step"],
        run["steps"],
        number(&run["loss"]),
        number(&run["samples_per_second"])
    );
    let _ = writeln!(
        text,
        "\n{:<28} {:>8} {:>8} {:>10} {:>8} {:>8} {:>8} {:>8}",
        "worker", "clock", "done", "computed", "loader", "pull", "push", "heard"
    );
    for worker in status["workers"].as_array().into_iter().flatten() {
        let place = worker["place"].as_str().unwrap_or("?");
        let [computed, loader, pull, push] =
            ["compute", "loader", "pull", "push"].map(|use_| number(&worker["seconds"][use_]));
        let _ = writeln!(
            text,
            "{place:<28} {:>8} {:>8} {computed:>8.1} s {loader:>6.1} s {pull:>6.1} s {push:>6.1} s {:>6.1} s",
            worker["clock"],
            worker["done"],
            number(&worker["heard_seconds_ago"])
        );
    }
    let _ = writeln!(
        text,
        "\n{:<28} {:>7} {:>10} {:>8} {:>10} {:>8} {:>10} {:>8} {:>9}",
        "server", "ranges", "held", "pulls", "sent", "pushes", "received", "refused", "updating"
    );
    for server in status["servers"].as_array().into_iter().flatten() {
        let address = server["address"].as_str().unwrap_or("?");
        let load = &server["load"];
        if load.is_null() {
            let _ = writeln!(text, "{address:<28} does not answer");
            continue;
        }
        let size = |key: &str| bytes(load[key].as_u64().unwrap_or(0) as usize);
        let _ = writeln!(
            text,
            "{address:<28} {:>7} {:>10} {:>8} {:>10} {:>8} {:>10} {:>8} {:>7.1} s",
            load["ranges"],
            size("bytes"),
            load["pulls"],
            size("pulled"),
            load["pushes"],
            size("pushed"),
            load["refused"],
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
            lease["task"].as_str().unwrap_or("?")
        );
    }
    text.trim_end().into()
}
