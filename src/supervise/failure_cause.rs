//! Finds the cause of a job's end in the lines of its standard error.

/// The cause of a job's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// The reason, for display.
    pub reason: String,
    /// The rank that failed first, if one is named.
    pub rank: Option<u64>,
    /// The host of that rank, if it is named.
    pub host: Option<String>,
}

/// The words of a hang report about two hosts that cannot reach each other.
const UNREACHABLE: &str = "do not reach each other";

/// Finds the cause in the lines of a job that ended with this code.
pub fn cause(lines: &[String], code: i32) -> Cause {
    let end = match code {
        0 => "finished successfully".into(),
        75 => "saved, to be continued".into(),
        code @ 129..=192 => format!("ended by signal {}", code - 128),
        code => format!("exit code {code}"),
    };
    // An error of a rank says most, then a launcher's message about a rank, then any error.
    let found = lines.iter().find(|line| line.contains("error: ") && line.contains("rank "));
    let found = found
        .or_else(|| lines.iter().find(|line| exited(line)))
        .or_else(|| lines.iter().find(|line| line.contains("error: ")));
    match found.filter(|_| !matches!(code, 0 | 75)) {
        None => Cause { reason: end, rank: None, host: None },
        // If two hosts cannot reach each other, the cause may be either of them.
        Some(line) if line.contains(UNREACHABLE) => {
            Cause { reason: format!("{end}: {}", message(line)), rank: None, host: None }
        }
        Some(line) => Cause {
            reason: format!("{end}: {}", message(line)),
            rank: rank(line),
            host: host(line),
        },
    }
}

/// Returns the message of a line, without `error: ` and what precedes it.
fn message(line: &str) -> &str {
    line.split_once("error: ").map_or(line, |(_, message)| message).trim()
}

/// Returns true if a line is a launcher's message that a rank has ended.
fn exited(line: &str) -> bool {
    line.contains("exited on signal")
        || line.contains(": task ")
        || line.contains("was ended by signal")
}

/// Returns the number after a word.
fn number_after(line: &str, word: &str) -> Option<u64> {
    let rest = &line[line.find(word)? + word.len()..];
    let digits: &str = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
    digits.parse().ok()
}

fn rank(line: &str) -> Option<u64> {
    // The rank whose connection has ended, rather than the one that reports it.
    if let Some((before, _)) = line.split_once(" is gone") {
        return before.rsplit_once("rank ").and_then(|(_, number)| number.parse().ok());
    }
    // The rank that does not answer, rather than the one that reports it, which is named in
    // brackets before a warning.
    let blamed = ["the job hangs: ", "] "]
        .iter()
        .find_map(|before| line.split_once(before))
        .map_or(line, |(_, blamed)| blamed);
    number_after(blamed, "rank ").or_else(|| number_after(line, ": task "))
}

fn host(line: &str) -> Option<String> {
    if let Some((before, _)) = line.split_once(": task ") {
        return leading_name(before.rsplit(' ').next().unwrap_or_default());
    }
    ["hangs: host ", "on node ", " on "]
        .iter()
        .find_map(|word| leading_name(&line[line.find(word)? + word.len()..]))
}

/// Returns the name of a host with which a text begins.
fn leading_name(text: &str) -> Option<String> {
    let end = text
        .find(|c: char| !(c.is_ascii_alphanumeric() || "-._".contains(c)))
        .unwrap_or(text.len());
    Some(text[..end].trim_end_matches('.').to_string()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(lines: &[&str], code: i32) -> (String, Option<u64>, Option<String>) {
        let Cause { reason: why, rank, host } =
            cause(&lines.iter().map(|line| line.to_string()).collect::<Vec<_>>(), code);
        (why, rank, host)
    }

    #[test]
    fn ranks_and_hosts_are_named() {
        let hang = "error: rank 0: the job hangs: rank 1 (process 7548 on n2) does not answer: last seen 7.5 s ago";
        let (why, rank, host) = found(&["step 1", hang, "MPI_ABORT was invoked"], 1);
        assert!(why.starts_with("exit code 1: rank 0: the job hangs"), "{why}");
        assert_eq!((rank, host.as_deref()), (Some(1), Some("n2")));
        let noticed =
            "mpirun noticed that process rank 3 with PID 0 on node n7 exited on signal 9 (Killed).";
        assert_eq!(found(&[noticed], 137).1, Some(3));
        assert_eq!(found(&[noticed], 137).2.as_deref(), Some("n7"));
        let gone = "error: rank 0: the job hangs: host h1 with ranks 2, 3 does not answer: rank 2 was last seen 5 s ago";
        assert_eq!((found(&[gone], 1).1, found(&[gone], 1).2.as_deref()), (Some(2), Some("h1")));
        let unreachable = "error: rank 1: the job hangs: hosts h0 and h1 do not reach each other: rank 0 waits for rank 2 in #9";
        let (why, rank, host) = found(&[unreachable], 1);
        assert!(
            why.contains("hosts h0 and h1 do not reach each other") && (rank, host) == (None, None),
            "{why}"
        );
        let slurm = "srun: error: node-4: task 12: Out Of Memory";
        let (why, rank, host) = found(&[slurm], 137);
        assert_eq!((rank, host.as_deref()), (Some(12), Some("node-4")));
        assert!(why.contains("Out Of Memory"), "{why}");
        let ended = "error: rank 0: rank 2 is gone: its connection ended";
        assert_eq!(
            found(&[ended], 1),
            ("exit code 1: rank 0: rank 2 is gone: its connection ended".into(), Some(2), None)
        );
        assert_eq!(found(&["[WARN rank 0] rank 1 was ended by signal 9"], 137).1, Some(1));
    }

    #[test]
    fn without_a_message_the_code_is_the_cause() {
        assert_eq!(found(&[], 139), ("ended by signal 11".into(), None, None));
        assert_eq!(found(&[], 205).0, "exit code 205");
        assert_eq!(found(&["error: x"], 75).0, "saved, to be continued");
        assert_eq!(found(&["error: cannot write x"], 74).0, "exit code 74: cannot write x");
    }
}
