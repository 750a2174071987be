//! Shows a text that changes on a terminal, in place. Where stdout is no terminal, the texts follow one another.
//!
//! `status.rs` uses it for `--watch`. The text is shown on the terminal's alternate screen, so the user's former screen
//! is still there afterwards. Every line is overwritten in one write and nothing is cleared before, so the screen does
//! not flicker. Begin at [`Screen::show`].

use std::io;

use super::output::{TerminalText, is_stdout_closed, print, print_raw, terminal_size};

/// Enters the alternate screen and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Shows the cursor and leaves the alternate screen.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// The place of a text that changes. On drop the terminal is as before, followed by the last text.
#[derive(Debug, Default)]
pub struct Screen {
    is_entered: bool,
    last: Option<TerminalText>,
}

impl Screen {
    /// Shows a text in place of the former one.
    ///
    /// # Errors
    /// Stdout cannot be written to.
    pub fn show(&mut self, text: TerminalText) -> io::Result<()> {
        self.last = Some(text);
        self.redraw()
    }

    /// Shows the last text again, for example when the size of the terminal has changed.
    ///
    /// # Errors
    /// Stdout cannot be written to.
    pub fn redraw(&mut self) -> io::Result<()> {
        let Some(text) = &self.last else { return Ok(()) };
        let Some((columns, rows)) = terminal_size() else { return print(text) };
        let mut frame = String::new();
        if !self.is_entered {
            frame.push_str(ENTER);
            self.is_entered = true;
        }
        frame.push_str("\x1b[H");
        let lines = text.fit_to_screen(columns, rows);
        for (at, line) in lines.iter().enumerate() {
            // The rest of the line is cleared after the text, so nothing is blank in between.
            frame.push_str(if at == 0 { "" } else { "\r\n" });
            frame.push_str(line);
            frame.push_str("\x1b[K");
        }
        frame.push_str("\x1b[J");
        print_raw(&frame)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if !self.is_entered || is_stdout_closed() {
            return;
        }
        // An error of the last output cannot be reported anywhere.
        let _ = print_raw(LEAVE);
        if let Some(text) = &self.last {
            let _ = print(text);
        }
    }
}
