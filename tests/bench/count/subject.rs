//! Pure: what is asked for, and what is in force meanwhile.

/// Whether the kernel half counts streams of HTTP/2, not one request a connection. Until it does, figures of `h2` are
/// those of an opaque connection.
pub(crate) const H2_STREAMS_ARE_COUNTED: bool = true;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Case {
    /// A hello over HTTP/1.1, heads of 40 and 160 bytes.
    H1,
    /// The same with heads as browsers and frameworks send them.
    H1Browser,
    /// A hello over HTTP/2.
    H2,
    /// A megabyte over HTTP/1.1.
    Bulk,
}

impl Case {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::H1 => "h1",
            Self::H1Browser => "h1_browser",
            Self::H2 if H2_STREAMS_ARE_COUNTED => "h2",
            Self::H2 => "h2_opaque",
            Self::Bulk => "bulk",
        }
    }

    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::H1 | Self::H2 => "/",
            Self::H1Browser => "/browser",
            Self::Bulk => "/bulk",
        }
    }

    pub(crate) fn subjects(self) -> &'static [Subject] {
        match self {
            Self::H1 | Self::Bulk => {
                &[Subject::Off, Subject::Rouse, Subject::Empty, Subject::Sidecar]
            }
            Self::H1Browser | Self::H2 => &[Subject::Off, Subject::Rouse, Subject::Sidecar],
        }
    }
}

/// What is in force, or in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// No program.
    Off,
    /// All programs of the kernel half.
    Rouse,
    /// Programs that do nothing, where those of the kernel half see packets.
    Empty,
    /// No program, and a proxy in front of the server.
    Sidecar,
}

impl Subject {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Rouse => "rouse",
            Self::Empty => "empty",
            Self::Sidecar => "nginx-sidecar",
        }
    }
}

/// Sockets that are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Uncounted {
    /// Of a pod of ours, on another port than the serving one.
    Port,
    /// Of a pod below the same cgroup that is not ours.
    Pod,
    /// Of a client in a pod below the same cgroup.
    Client,
    /// Of a pod in a cgroup where nothing is attached.
    Foreign,
}

impl Uncounted {
    pub(crate) const ALL: [Self; 4] = [Self::Port, Self::Pod, Self::Client, Self::Foreign];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Port => "uncounted_port",
            Self::Pod => "uncounted_pod",
            Self::Client => "uncounted_client",
            Self::Foreign => "foreign",
        }
    }
}
