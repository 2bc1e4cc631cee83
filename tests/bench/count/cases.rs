//! Pure: cases and subjects of the bench.

/// True if the eBPF programs count HTTP/2 streams, and not one request a connection. While false, figures of `h2` are
/// those of an opaque connection.
pub(crate) const H2_STREAMS_ARE_COUNTED: bool = true;

/// Kind of request and response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CountBenchCase {
    /// A short response over HTTP/1.1, with heads of 40 and 160 bytes.
    H1,
    /// A short response over HTTP/1.1, with heads as browsers and frameworks send them.
    H1Browser,
    /// A short response over HTTP/2.
    H2,
    /// A response of one megabyte over HTTP/1.1.
    Bulk,
}

impl CountBenchCase {
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

    pub(crate) fn subjects(self) -> &'static [CountBenchSubject] {
        match self {
            Self::H1 | Self::Bulk => &[
                CountBenchSubject::Off,
                CountBenchSubject::Rouse,
                CountBenchSubject::Empty,
                CountBenchSubject::Sidecar,
            ],
            Self::H1Browser | Self::H2 => {
                &[CountBenchSubject::Off, CountBenchSubject::Rouse, CountBenchSubject::Sidecar]
            }
        }
    }
}

/// Programs or proxy in force during a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CountBenchSubject {
    /// No program and no proxy.
    Off,
    /// All eBPF programs of Rouse.
    Rouse,
    /// Empty programs, on the packet hooks of Rouse's programs.
    Empty,
    /// No program, and a proxy in front of the server.
    Sidecar,
}

impl CountBenchSubject {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Rouse => "rouse",
            Self::Empty => "empty",
            Self::Sidecar => "nginx-sidecar",
        }
    }
}

/// Sockets whose requests are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UncountedSocket {
    /// Socket of one of Rouse's pods, on another port than the serving port.
    Port,
    /// Socket of a pod below the same cgroup that does not belong to Rouse.
    Pod,
    /// Socket of a client in a pod below the same cgroup.
    Client,
    /// Socket of a pod in a cgroup without programs.
    Foreign,
}

impl UncountedSocket {
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
