//! Shell: the file in which each request's begin and end stands, and the file that lets those go on that wait.

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

/// A request that has begun. Its end is noted when this is dropped.
#[derive(Debug)]
pub(crate) struct Begun(());

impl Begun {
    pub(crate) fn now() -> Self {
        note("+\n");
        Self(())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        note("-\n");
    }
}

/// Two bytes that are appended stay together.
fn note(line: &str) {
    if let Some(mut book) = BOOK.as_ref() {
        book.write_all(line.as_bytes()).expect("BOOK can be written");
    }
}

/// Waits until the gate is open.
pub(crate) async fn wait() {
    let gate = env::var("GATE").unwrap_or_default();
    while !Path::new(&gate).exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
