//! Shell: a file with the names that clients gave their requests, so that a test can tell which were served, and how often.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::Path,
};

/// Where they are written. Each stands there before the request is answered, also when the process is killed.
#[derive(Debug)]
pub(crate) struct Ids(Option<File>);

impl Ids {
    /// Opens the file of `pod` in `folder`; none where no folder is given.
    pub(crate) fn open(folder: Option<&Path>, pod: &str) -> io::Result<Self> {
        let open =
            |folder: &Path| OpenOptions::new().create(true).append(true).open(folder.join(pod));
        folder.map(open).transpose().map(Self)
    }

    /// A request with this name has begun.
    pub(crate) fn note(&self, id: u64) -> io::Result<()> {
        let line = format!("{id}\n");
        self.0.as_ref().map_or(Ok(()), |mut file| file.write_all(line.as_bytes()))
    }
}
