//! Shell: a file of the ids that clients gave their requests, by which tests see the served requests, and repeated
//! ones.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::Path,
};

/// File of the ids. An id is written before its request gets a response, so it survives a kill of the process.
#[derive(Debug)]
pub(crate) struct RequestIdFile(Option<File>);

impl RequestIdFile {
    /// Opens the file of `pod` in `folder`; without a folder no ids are written.
    pub(crate) fn open(folder: Option<&Path>, pod: &str) -> io::Result<Self> {
        let open =
            |folder: &Path| OpenOptions::new().create(true).append(true).open(folder.join(pod));
        folder.map(open).transpose().map(Self)
    }

    /// Appends the id of a request that has begun.
    pub(crate) fn append(&self, id: u64) -> io::Result<()> {
        let line = format!("{id}\n");
        self.0.as_ref().map_or(Ok(()), |mut file| file.write_all(line.as_bytes()))
    }
}
