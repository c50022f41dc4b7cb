//! A run in the terminal: its curves, rates, ranks, checkpoints and log, while it is trained or
//! afterwards.

#![forbid(unsafe_code)]

mod follow;
mod run_view;
mod screen;

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use hpctrain_base::error::{Error, Result};
use hpctrain_base::signals;
use run_view::{Quantity, RunView};
use screen::{Choices, PANELS, Panel};

/// The longest wait for a key, after which signals are seen.
const POLL: Duration = Duration::from_millis(200);

impl Choices {
    fn new() -> Self {
        Self {
            panel: Panel::Curve(Quantity::Loss),
            is_zoomed: false,
            is_logarithmic: false,
            is_ascii: !has_utf8(),
        }
    }

    /// Applies a key. Returns whether it ends the program.
    fn press(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('z') => self.is_zoomed = !self.is_zoomed,
            KeyCode::Char('l') => self.is_logarithmic = !self.is_logarithmic,
            KeyCode::Tab | KeyCode::Right => self.turn(1),
            KeyCode::BackTab | KeyCode::Left => self.turn(PANELS.len() - 1),
            KeyCode::Char(digit) => {
                let index = digit.to_digit(10).and_then(|digit| digit.checked_sub(1));
                if let Some((panel, _)) = index.and_then(|index| PANELS.get(index as usize)) {
                    self.panel = *panel;
                }
            }
            _ => {}
        }
        false
    }

    /// Goes `by` panels on.
    fn turn(&mut self, by: usize) {
        let at = PANELS.iter().position(|(panel, _)| *panel == self.panel).unwrap_or(0);
        self.panel = PANELS[(at + by) % PANELS.len()].0;
    }
}

/// Shows the run at `path` in the terminal and reads its files every `interval`, until the user
/// quits.
///
/// # Errors
/// Returns an error if the directory is not a run, or standard output is not a terminal.
pub fn watch(path: &Path, interval: Duration) -> Result<()> {
    let mut view = RunView::open(path)?;
    if !(std::io::stdout().is_terminal() && std::io::stdin().is_terminal()) {
        return Err(Error::input("watch needs a terminal, and its input or output is none")
            .hint("print one screen with --once"));
    }
    signals::record_signals()?;
    let failed = |e: std::io::Error| Error::internal(format!("the terminal fails: {e}"));
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let shown = show(&mut terminal, &mut view, interval);
    ratatui::try_restore().map_err(failed)?;
    shown.map_err(failed)
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut RunView,
    interval: Duration,
) -> std::io::Result<()> {
    let mut choices = Choices::new();
    let mut is_reading = true;
    let mut refreshed: Option<Instant> = None;
    loop {
        if is_reading || refreshed.is_none_or(|at| at.elapsed() >= interval) {
            is_reading = view.refresh();
            refreshed = Some(Instant::now());
        }
        terminal.draw(|frame| screen::draw(frame, view, choices, is_reading))?;
        let left = refreshed.map_or(Duration::ZERO, |at| interval.saturating_sub(at.elapsed()));
        let wait = if is_reading { Duration::ZERO } else { left.min(POLL) };
        // Several keys may have been pressed since the last frame.
        let mut has_event = event::poll(wait)?;
        while has_event {
            if let Event::Key(key) = event::read()?
                && key.kind != KeyEventKind::Release
                && choices.press(key)
            {
                return Ok(());
            }
            has_event = event::poll(Duration::ZERO)?;
        }
        if signals::last_signal().is_some() {
            return Ok(());
        }
    }
}

/// Returns the screen of the run at `path` as text of `columns` and `rows`, without colours.
/// `panel` is the key of the panel, from 1.
///
/// # Errors
/// Returns an error if the directory is not a run.
pub fn screen_text(path: &Path, columns: u16, rows: u16, panel: usize) -> Result<String> {
    let mut view = RunView::open(path)?;
    while view.refresh() {}
    let mut choices = Choices::new();
    choices.turn(panel.saturating_sub(1));
    let Ok(mut terminal) = Terminal::new(TestBackend::new(columns, rows));
    let Ok(_) = terminal.draw(|frame| screen::draw(frame, &view, choices, false));
    Ok(text(terminal.backend().buffer()))
}

/// Returns the lines of a buffer without trailing spaces.
fn text(buffer: &Buffer) -> String {
    let rows = buffer.content.chunks(usize::from(buffer.area.width).max(1));
    let lines = rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
    lines.map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// Returns whether the locale has UTF-8, by the first variable that is set.
fn has_utf8() -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    set.is_some_and(|locale| {
        let locale = locale.to_lowercase();
        locale.contains("utf-8") || locale.contains("utf8")
    })
}

#[cfg(test)]
mod tests;
