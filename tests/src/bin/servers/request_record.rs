//! Shell: the request record, a file with the begin and the end of each request, and the gate, a file that waiting
//! requests need.

use std::{
    env,
    fs::{File, OpenOptions},
    io::Write as _,
    path::Path,
    sync::LazyLock,
    time::Duration,
};

static BOOK: LazyLock<Option<File>> = LazyLock::new(|| {
    let file = OpenOptions::new().append(true).create(true).open(env::var_os("BOOK")?);
    Some(file.expect("BOOK names a file that can be written"))
});

/// A request that has begun. Its end is written to the request record on drop.
#[derive(Debug)]
pub(crate) struct RecordedRequest(());

impl RecordedRequest {
    pub(crate) fn begin() -> Self {
        append_line("+\n");
        Self(())
    }
}

impl Drop for RecordedRequest {
    fn drop(&mut self) {
        append_line("-\n");
    }
}

/// Appends a line in one write, so that lines of several processes are not mixed.
fn append_line(line: &str) {
    if let Some(mut book) = BOOK.as_ref() {
        book.write_all(line.as_bytes()).expect("BOOK can be written");
    }
}

/// Waits until the gate file exists.
pub(crate) async fn wait_for_gate() {
    let gate = env::var("GATE").unwrap_or_default();
    while !Path::new(&gate).exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
