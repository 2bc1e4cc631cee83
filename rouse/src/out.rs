//! Shell: standard output and error. A reader that has gone (`rouse get ksvc | head -1`) is no failure.

use std::io::{self, ErrorKind, Write as _};

/// Prints `text` as it is.
pub(crate) fn text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        done => done,
    }
}

/// Prints one line.
pub(crate) fn line(line: &str) -> io::Result<()> {
    text(&format!("{line}\n"))
}

/// Says something to the person on standard error. Without one there is nobody to tell.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
