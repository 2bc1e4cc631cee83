//! Pure: errors of the user's commands, in kubectl's words.

use std::{io, path::PathBuf};

/// Error that ended a command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// No object of that name exists.
    #[error("Error from server (NotFound): {resource} {name:?} not found")]
    NotFound {
        /// Plural of the kind with its group, such as `services.serving.knative.dev`.
        resource: &'static str,
        /// Name of the object, without its namespace.
        name: String,
    },
    /// No kind of that name exists.
    #[error("error: the server doesn't have a resource type {0:?}")]
    UnknownKind(String),
    /// The arguments contradict each other or are incomplete.
    #[error("error: {0}")]
    Usage(String),
    /// An agent or activator cannot be asked, or did not answer.
    #[error("error: {0}")]
    Component(String),
    /// A manifest is invalid.
    #[error("error: {file}: {reason}")]
    Manifest {
        /// Path of the file, as given.
        file: String,
        /// Problem, and the way to fix it.
        reason: String,
    },
    /// A file operation failed.
    #[error("error: cannot {attempt} {path}")]
    File {
        /// Operation that failed, as a verb: `read`, `write`.
        attempt: &'static str,
        /// Path of the file.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Standard output or the terminal failed.
    #[error("error: cannot print")]
    Print(#[from] io::Error),
    /// The node is not running.
    #[error("error: node {node:?} is not running: start it with `rouse up`{hint}")]
    NodeDown {
        /// Name of the node.
        node: String,
        /// Further advice, or nothing.
        hint: &'static str,
    },
}

impl CommandError {
    /// Returns a function for `map_err` on an operation on `path`.
    pub(crate) fn file_error(
        attempt: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { attempt, path, source }
    }
}

/// Formats an error and its causes on one line that begins like kubectl's.
pub(crate) fn error_line(error: &anyhow::Error) -> String {
    // The files of a node belong to root.
    let hint = match error.downcast_ref() {
        Some(CommandError::File { source, .. })
            if source.kind() == io::ErrorKind::PermissionDenied =>
        {
            "; try sudo"
        }
        _ => "",
    };
    let text = format!("{error:#}{hint}");
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
        let missing = CommandError::NotFound { resource: "pods", name: "x".into() };
        assert_eq!(
            error_line(&missing.into()),
            "Error from server (NotFound): pods \"x\" not found"
        );
        let absent = io::Error::from(io::ErrorKind::NotFound);
        let file = CommandError::file_error("read", "/tmp/x")(absent);
        assert_eq!(error_line(&file.into()), "error: cannot read /tmp/x: entity not found");
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let file = CommandError::file_error("write", "/tmp/x")(denied);
        let line = error_line(&file.into());
        assert_eq!(line, "error: cannot write /tmp/x: permission denied; try sudo");
        assert_eq!(error_line(&anyhow::anyhow!("no")), "error: no");
    }
}
