//! What people and programs see of a run: banner, progress, metrics, logs.

pub mod banner;
pub mod logging;
pub mod metrics;
pub mod progress;
pub mod run_card;
pub mod straggler;
pub mod times;

/// Prints a line to standard output. A run goes on, and a command ends well, when nobody reads it any more.
pub fn say(line: impl std::fmt::Display) {
    use std::io::Write as _;
    match writeln!(std::io::stdout(), "{line}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => log::error!("cannot write to standard output: {e}"),
        _ => {}
    }
}

/// Seconds since 1970, for records.
pub fn unix_time() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Bytes with a binary unit: `12.5 MiB`.
pub fn bytes(count: usize) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1023, 1024, 13_107_200].map(bytes), ["0 B", "1023 B", "1.0 KiB", "12.5 MiB"]);
    }
}
