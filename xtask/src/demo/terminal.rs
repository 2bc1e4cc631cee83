//! Shell: output on the terminal: permanent lines for events, and one redrawn line for the present state.

use std::{
    io::{IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

/// Terminal or log file to which the demonstration prints.
#[derive(Debug)]
pub(super) struct DemoScreen {
    started: Instant,
    is_terminal: bool,
    /// Time when the live line was last printed, for output that cannot be redrawn.
    printed: Option<Instant>,
}

impl DemoScreen {
    pub(super) fn new() -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        Self { started: Instant::now(), is_terminal, printed: None }
    }

    /// Prints a permanent line.
    pub(super) fn print_line(&self, text: &str) {
        println!("{}{:6.1} s  {text}", self.clear_sequence(), self.started.elapsed().as_secs_f64());
    }

    /// Shows the live line. In a log file it appears once a second.
    pub(super) fn redraw_live_line(&mut self, text: &str) {
        let now = Instant::now();
        if self.is_terminal {
            let seconds = self.started.elapsed().as_secs_f64();
            print!("{}{seconds:6.1} s  {text}", self.clear_sequence());
            let _ = std::io::stdout().flush();
        } else if self.printed.is_none_or(|last| now - last >= Duration::from_secs(1)) {
            self.printed = Some(now);
            self.print_line(text);
        }
    }

    fn clear_sequence(&self) -> &'static str {
        if self.is_terminal { "\r\x1b[2K" } else { "" }
    }
}
