//! Shell: standard output and error. A closed reader (`rouse get ksvc | head -1`) is no error.

use std::io::{self, ErrorKind, Write as _};

/// Prints `text` unchanged to standard output.
pub(crate) fn print_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        result => result,
    }
}

/// Prints one line to standard output.
pub(crate) fn print_line(line: &str) -> io::Result<()> {
    print_text(&format!("{line}\n"))
}

/// Prints a message to standard error. A failure is ignored: there is no other place to report it.
pub(crate) fn print_error(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
