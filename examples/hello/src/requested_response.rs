//! Pure: the response that a request specifies, parsed from its path and query.
//!
//! | path | response |
//! |---|---|
//! | `/counts` | the application's own counts as JSON |
//! | `/headers` | the request's headers, one per line, as they arrived |
//! | `/env` | arguments, working directory and environment, one per line |
//! | `/echo` | the request's body |
//! | `/protocol` | the HTTP version of the request |
//! | `/files/NAME` | the file NAME in the folder `HELLO_FILES`, or 404 if there is none |
//! | `/upgrade` | 101 to the requested protocol, then an echo of all bytes |
//! | `/grpc.health.v1.Health/Check` | `SERVING`, as gRPC health checks expect |
//! | `/ready` | 200 once `HELLO_READY_AFTER_MS` has passed, 503 before |
//! | any other | `Hello from POD` |

use std::time::Duration;

/// Largest body that the query may request: enough for any test, too little to fill a machine's memory.
const MAX_BODY: u64 = 1 << 30;

/// Properties of the response that one request specifies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestedResponse {
    /// Page that the path selects.
    pub(crate) page: HelloPage,
    /// `sleep=MS`: milliseconds to wait before the response.
    pub(crate) sleep: Duration,
    /// `status=N`: final status of the response; a number below 200 means 200.
    pub(crate) status: u16,
    /// `bytes=N`: a body of this many bytes instead of the page.
    pub(crate) bytes: Option<u64>,
    /// `chunks=N`: this many chunks of 1 KiB without a content-length, and a trailer.
    pub(crate) chunks: Option<u64>,
    /// `close`: end the connection after this response.
    pub(crate) close: bool,
    /// `abort`: end the connection without a response.
    pub(crate) abort: bool,
    /// `exit=CODE`: end the whole process without a response.
    pub(crate) exit: Option<u8>,
    /// `id=N`: name that the client gives this request; appended to the file of `HELLO_IDS`.
    pub(crate) id: Option<u64>,
}

/// Page of the sample application, by path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloPage {
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

impl RequestedResponse {
    /// Parses a request target. Unknown parameters are ignored; a malformed value gives a one-line error.
    pub(crate) fn parse(path: &str, query: Option<&str>) -> Result<Self, String> {
        let mut requested = Self {
            page: HelloPage::from_path(path),
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
            // A parameter without a value is a flag, such as `close`.
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            requested.set_parameter(key, value)?;
        }
        Ok(requested)
    }

    fn set_parameter(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "sleep" => self.sleep = Duration::from_millis(parse_number(key, value, 3_600_000)?),
            "status" => {
                self.status = u16::try_from(parse_number(key, value, 599)?.max(200)).unwrap_or(200);
            }
            "bytes" => self.bytes = Some(parse_number(key, value, MAX_BODY)?),
            "chunks" => self.chunks = Some(parse_number(key, value, MAX_BODY >> 10)?),
            "close" => self.close = true,
            "abort" => self.abort = true,
            "exit" => self.exit = Some(u8::try_from(parse_number(key, value, 255)?).unwrap_or(1)),
            "id" => self.id = Some(parse_number(key, value, u64::MAX)?),
            // Clients may add parameters of their own to tell requests apart.
            _ => {}
        }
        Ok(())
    }
}

impl HelloPage {
    fn from_path(path: &str) -> Self {
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

fn parse_number(key: &str, value: &str, most: u64) -> Result<u64, String> {
    match value.parse() {
        Ok(number) if number <= most => Ok(number),
        _ => Err(format!("{key}={value}: must be a number from 0 to {most}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_sets_each_property_and_unknown_parameters_are_ignored() {
        let requested = RequestedResponse::parse(
            "/echo",
            Some("sleep=20&status=503&bytes=9&close&exit=3&n=17&id=8"),
        );
        let expected = RequestedResponse {
            page: HelloPage::Echo,
            sleep: Duration::from_millis(20),
            status: 503,
            bytes: Some(9),
            chunks: None,
            close: true,
            abort: false,
            exit: Some(3),
            id: Some(8),
        };
        assert_eq!(requested, Ok(expected));
    }

    #[test]
    fn a_number_out_of_range_is_refused_with_its_range() {
        assert_eq!(
            RequestedResponse::parse("/", Some("sleep=soon")),
            Err("sleep=soon: must be a number from 0 to 3600000".into())
        );
    }
}
