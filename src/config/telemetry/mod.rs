//! Output of a run: startup summary, progress, metrics, logs, traces.

pub mod classes;
mod console;
pub mod efficiency;
pub mod elastic;
pub mod epoch_loss;
pub mod evaluations;
pub mod goodput;
pub mod json_lines;
pub mod logging;
pub mod long_lines;
pub mod metrics;
pub mod profile;
pub mod progress;
pub mod rank_times;
pub mod restarts;
pub mod run_record;
pub mod short_lines;
pub mod starts;
pub mod startup_summary;
pub mod straggler;
pub mod tensorboard;
pub mod text_samples;
pub mod times;
pub mod trace;
pub mod trace_file;
pub mod worker_records;

pub use console::{say, say_error, say_text, stdout_error};

pub use hpctrain_device::format_bytes as bytes;

/// Returns the seconds since 1970, for records.
pub fn unix_time() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// Formats seconds since 1970 as a time in UTC, such as `2023-11-14T22:13:20Z`; none unless its
/// year has four digits.
pub fn utc(since_1970: f64) -> Option<String> {
    let is_formatted = since_1970 > 0.0 && since_1970 < 253_402_300_799.0;
    let since =
        is_formatted.then(|| std::time::Duration::try_from_secs_f64(since_1970).ok()).flatten()?;
    let time = std::time::UNIX_EPOCH.checked_add(since)?;
    Some(humantime::format_rfc3339_seconds(time).to_string())
}

/// Formats a number with separators: `1234567` as `1,234,567`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(utc(1.7e9).as_deref(), Some("2023-11-14T22:13:20Z"));
        assert_eq!(utc(253_402_300_798.9).as_deref(), Some("9999-12-31T23:59:58Z"));
        assert_eq!(
            [0.0, -1.0, 253_402_300_799.0, 1e18, 1e300, f64::NAN, f64::INFINITY].map(utc),
            [const { None }; 7]
        );
    }
}
