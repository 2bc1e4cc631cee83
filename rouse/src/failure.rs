//! Pure: what can go wrong for the person at the terminal, in kubectl's words.

use std::{io, path::PathBuf};

/// Why a command ended without doing what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// There is no such object.
    #[error("Error from server (NotFound): {resource} {name:?} not found")]
    NotFound {
        /// `services.serving.knative.dev`
        resource: &'static str,
        /// Its name.
        name: String,
    },
    /// There is no such kind.
    #[error("error: the server doesn't have a resource type {0:?}")]
    Kind(String),
    /// The words make no sense together.
    #[error("error: {0}")]
    Usage(String),
    /// A manifest cannot be used.
    #[error("error: {file}: {why}")]
    Manifest {
        /// As given.
        file: String,
        /// What is wrong and what to do.
        why: String,
    },
    /// A file cannot be used.
    #[error("error: cannot {attempt} {path}")]
    File {
        /// What was tried.
        attempt: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The terminal cannot be used.
    #[error("error: cannot print")]
    Print(#[from] io::Error),
    /// The node is not there.
    #[error("error: node {node:?} is not running: start it with `rouse up`{hint}")]
    Down {
        /// Its name.
        node: String,
        /// More to try, or nothing.
        hint: &'static str,
    },
}

impl Failure {
    /// For `map_err` on a file operation.
    pub(crate) fn file(
        attempt: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { attempt, path, source }
    }
}

/// An error with its causes, on one line that begins as kubectl's do.
pub(crate) fn text(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    if text.starts_with("error: ") || text.starts_with("Error from server") {
        text
    } else {
        format!("error: {text}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_read_as_kubectls() {
        let missing = Failure::NotFound { resource: "pods", name: "x".into() };
        assert_eq!(text(&missing.into()), "Error from server (NotFound): pods \"x\" not found");
        let absent = io::Error::from(io::ErrorKind::NotFound);
        let file = Failure::file("read", "/tmp/x")(absent);
        assert_eq!(text(&file.into()), "error: cannot read /tmp/x: entity not found");
        assert_eq!(text(&anyhow::anyhow!("no")), "error: no");
    }
}
