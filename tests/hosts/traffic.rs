//! The bytes between hosts, counted on their interfaces, match the formula.

use crate::long;
use hpctrain_testkit::hosts::Hosts;
use hpctrain_testkit::launch::Transport::Alone;
use hpctrain_testkit::launch::finish;
use hpctrain_testkit::runs::{Run, json};

/// Headers of Ethernet, IP and TCP, acknowledgements and padding of units, relative to the bytes of
/// elements. Segments are long on software interfaces.
const HEADERS: f64 = 0.02;

/// The bytes per step of everything else: losses, norms and flags of ranks, the launcher's
/// messages.
const CONTROL: f64 = 8192.0;

/// With k hosts, a host sends (k − 1)/k of the elements in each reduce-scatter or all-gather,
/// however many ranks it has; an all-reduce is one of each. Other algorithms send as much or more.
#[test]
fn hierarchical_sends_between_hosts_what_its_formula_says() {
    const STEPS: (u64, u64) = (4, 24);
    let root = tempfile::tempdir().unwrap();
    let all = [(2, "h0:2,h1:2"), (2, "h0:1,h1:3"), (3, "h0:2,h1:2,h2:2")];
    for (count, ranks) in all.into_iter().take(if long() { 3 } else { 2 }) {
        let Some(hosts) = Hosts::new(count) else { return };
        for (zero, operations) in [(0, 2.0), (1, 2.0)].into_iter().take(if long() { 2 } else { 1 })
        {
            // The bytes of start and end are the same in a short run and a long one.
            let sent = [STEPS.0, STEPS.1].map(|steps| {
                let settings = [
                    format!("run.steps={steps}"),
                    format!("parallel.zero={zero}"),
                    "comm.algorithm=hierarchical".into(),
                    "model.width=128".into(),
                    "batch.global=12".into(),
                    "eval.every=0".into(),
                    "eval.samples=4".into(),
                    "checkpoint.every=0".into(),
                ];
                let name = format!("{count}-{}-{zero}-{steps}", ranks.len());
                let name = format!("{name}-{}", &ranks[3..4]);
                let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
                let run = Run::new(Alone, root.path(), &name, &settings);
                let before: Vec<_> =
                    (0..count).map(|host| hosts.bytes(&format!("h{host}"))).collect();
                finish(&mut hosts.across(ranks, &run.command())).succeeded();
                let parameters =
                    json(&run.files().path("run.json"))["parameters"].as_u64().unwrap() as f64;
                let sent = (0..count)
                    .map(|host| (hosts.bytes(&format!("h{host}")).0 - before[host].0) as f64);
                (parameters, sent.collect::<Vec<_>>())
            });
            let [(parameters, few), (_, many)] = sent;
            let hosts = count as f64;
            let wanted = operations * (hosts - 1.0) / hosts * parameters * size_of::<f32>() as f64;
            for (host, (few, many)) in few.iter().zip(&many).enumerate() {
                let step = (many - few) / (STEPS.1 - STEPS.0) as f64;
                println!(
                    "{ranks}, ZeRO {zero}: h{host} sends {step:.0} bytes a step, by the formula {wanted:.0}"
                );
                assert!(
                    step >= wanted && step <= wanted * (1.0 + HEADERS) + CONTROL,
                    "{ranks}, ZeRO {zero}: h{host} sends {step} bytes a step, not {wanted}"
                );
            }
        }
    }
}
