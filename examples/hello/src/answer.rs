//! Pure: what a request asks for, read from its path and query.
//!
//! | path | answers |
//! |---|---|
//! | `/counts` | the application's own counts as JSON |
//! | `/headers` | the request's headers, one a line, as they arrived |
//! | `/env` | arguments, working directory and environment, one a line |
//! | `/echo` | the request's body |
//! | `/protocol` | the version of HTTP that it was asked in |
//! | `/files/NAME` | the file NAME of the folder `HELLO_FILES`, 404 where there is none |
//! | `/upgrade` | 101 to any protocol asked for, then echoes bytes |
//! | `/grpc.health.v1.Health/Check` | `SERVING`, as gRPC asks for health |
//! | `/ready` | 200 once `HELLO_READY_AFTER_MS` has passed, 503 before |
//! | any other | `Hello from POD` |

use std::time::Duration;

/// Largest body the query may ask for: enough for any test, too little to fill a machine's memory.
const MAX_BODY: u64 = 1 << 30;

/// What one request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wish {
    /// Which answer.
    pub(crate) page: Page,
    /// `sleep=MS`: wait so long before answering.
    pub(crate) sleep: Duration,
    /// `status=N`: answer with this status.
    pub(crate) status: u16,
    /// `bytes=N`: answer a body of so many bytes instead of the page.
    pub(crate) bytes: Option<u64>,
    /// `chunks=N`: answer so many chunks of 1 KiB without a content-length, with a trailer.
    pub(crate) chunks: Option<u64>,
    /// `close`: end the connection after this answer.
    pub(crate) close: bool,
    /// `abort`: end the connection without an answer.
    pub(crate) abort: bool,
    /// `exit=CODE`: end the whole process without an answer.
    pub(crate) exit: Option<u8>,
    /// `id=N`: what the client calls this request; kept where `HELLO_IDS` says.
    pub(crate) id: Option<u64>,
}

/// Which answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Page {
    Hello,
    Counts,
    Headers,
    Env,
    Echo,
    Protocol,
    Files,
    Upgrade,
    Health,
    Ready,
}

impl Wish {
    /// Reads a request target. An unknown or malformed wish is refused with one line.
    pub(crate) fn parse(path: &str, query: Option<&str>) -> Result<Self, String> {
        let mut wish = Self {
            page: Page::of(path),
            sleep: Duration::ZERO,
            status: 200,
            bytes: None,
            chunks: None,
            close: false,
            abort: false,
            exit: None,
            id: None,
        };
        for part in query.unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            wish.set(key, value)?;
        }
        Ok(wish)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "sleep" => self.sleep = Duration::from_millis(number(key, value, 3_600_000)?),
            "status" => {
                self.status = u16::try_from(number(key, value, 599)?.max(200)).unwrap_or(200);
            }
            "bytes" => self.bytes = Some(number(key, value, MAX_BODY)?),
            "chunks" => self.chunks = Some(number(key, value, MAX_BODY >> 10)?),
            "close" => self.close = true,
            "abort" => self.abort = true,
            "exit" => self.exit = Some(u8::try_from(number(key, value, 255)?).unwrap_or(1)),
            "id" => self.id = Some(number(key, value, u64::MAX)?),
            // Clients add parameters of their own to keep requests apart.
            _ => {}
        }
        Ok(())
    }
}

impl Page {
    fn of(path: &str) -> Self {
        match path {
            "/counts" => Self::Counts,
            "/headers" => Self::Headers,
            "/env" => Self::Env,
            "/echo" => Self::Echo,
            "/protocol" => Self::Protocol,
            path if path.starts_with("/files/") => Self::Files,
            "/upgrade" => Self::Upgrade,
            "/grpc.health.v1.Health/Check" => Self::Health,
            "/ready" => Self::Ready,
            _ => Self::Hello,
        }
    }
}

fn number(key: &str, value: &str, most: u64) -> Result<u64, String> {
    match value.parse() {
        Ok(number) if number <= most => Ok(number),
        _ => Err(format!("{key}={value}: must be a number from 0 to {most}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_sets_each_wish_and_strangers_are_ignored() {
        let wish = Wish::parse("/echo", Some("sleep=20&status=503&bytes=9&close&exit=3&n=17&id=8"));
        let want = Wish {
            page: Page::Echo,
            sleep: Duration::from_millis(20),
            status: 503,
            bytes: Some(9),
            chunks: None,
            close: true,
            abort: false,
            exit: Some(3),
            id: Some(8),
        };
        assert_eq!(wish, Ok(want));
    }

    #[test]
    fn a_number_out_of_range_is_refused_with_its_range() {
        assert_eq!(
            Wish::parse("/", Some("sleep=soon")),
            Err("sleep=soon: must be a number from 0 to 3600000".into())
        );
    }
}
