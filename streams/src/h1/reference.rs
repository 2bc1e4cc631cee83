//! Pure: reference for request boundaries, from RFC 9112: slow, obvious, and independent of `datapath::h1`.
//!
//! Servers differ. Each point of difference is an [`UnusualForm`]. A [`ServerProfile`] accepts some of them and refuses
//! the rest: with 400 or a similar response, and a close. The behaviour of real servers was measured, one request for
//! each point.

mod reader;

use self::reader::ReferenceReader;

/// Form of a message that some servers accept and some refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnusualForm {
    /// A method with lower-case letters, digits or symbols after its first letter.
    Method,
    /// A method that begins with no letter, or `PRI`, which RFC 9113 §11.6 reserves for HTTP/2.
    Symbol,
    /// More than one space between the words of the request line, or one behind them.
    Spaces,
    /// A tab between the words of the request line.
    Tabs,
    /// A target with bytes outside printable ASCII.
    Target,
    /// HTTP/1.2 and later.
    Version,
    /// A line of the head that ends with a line feed alone.
    LineFeed,
    /// A carriage return inside a line.
    CarriageReturn,
    /// A header line that continues in the next line.
    Fold,
    /// The option `close`, continued in the next line by more text of the same element.
    FoldedClose,
    /// A carriage return inside a line of connection options: nginx ends the line there, others read it as part of a
    /// word.
    ReturnInConnection,
    /// A blank between a header's name and its colon.
    Blank,
    /// A header line without a colon.
    NoColon,
    /// A header name that is not a token.
    Name,
    /// A control character in a header's value.
    Value,
    /// Content-Length twice, with the same number.
    Lengths,
    /// Content-Length as a list of the same numbers.
    LengthList,
    /// Both Content-Length and Transfer-Encoding in one head.
    LengthAndCoding,
    /// A coding before `chunked`.
    Codings,
    /// A byte outside ASCII in a list of codings or of connection options.
    NonAscii,
    /// An empty element in the list of codings.
    EmptyCoding,
    /// Transfer-Encoding in HTTP/1.0.
    OldCoding,
    /// Blanks behind the size of a chunk.
    ChunkBlank,
    /// A chunk's size of more than 16 digits.
    ChunkZeros,
    /// A bare line feed after a chunk's size or after its data.
    ChunkLineFeed,
    /// A trailer line that is not a header line, or that ends with a bare line feed.
    Trailer,
    /// The first frame of an HTTP/2 server, behind a 101.
    Http2Frame,
}

/// Server whose reading is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerProfile {
    /// Accepts no unusual form at all.
    Strict,
    /// Behaves like nginx 1.22.
    Nginx,
    /// Behaves like `net/http` of Go 1.26.
    Go,
    /// Behaves like Node 20.
    Node,
    /// Accepts each form that any server accepts.
    Lax,
}

impl ServerProfile {
    /// All servers that are imitated.
    pub const ALL: [Self; 5] = [Self::Strict, Self::Nginx, Self::Go, Self::Node, Self::Lax];

    /// Returns true if the server accepts this form. Forms that no client sends and that the eBPF programs do not
    /// follow are left out.
    fn accepts(self, form: UnusualForm) -> bool {
        match self {
            Self::Strict => false,
            Self::Nginx => matches!(
                form,
                UnusualForm::Spaces
                    | UnusualForm::Target
                    | UnusualForm::Version
                    | UnusualForm::LineFeed
                    | UnusualForm::Name
                    | UnusualForm::ChunkBlank
                    | UnusualForm::ChunkZeros
                    | UnusualForm::ChunkLineFeed
                    | UnusualForm::Trailer
            ),
            Self::Go => matches!(
                form,
                UnusualForm::Method
                    | UnusualForm::Target
                    | UnusualForm::Version
                    | UnusualForm::LineFeed
                    | UnusualForm::Fold
                    | UnusualForm::Lengths
                    | UnusualForm::LengthAndCoding
                    | UnusualForm::ChunkBlank
            ),
            Self::Node => {
                matches!(form, UnusualForm::Spaces | UnusualForm::Codings | UnusualForm::ChunkZeros)
            }
            Self::Lax => !matches!(
                form,
                UnusualForm::Symbol
                    | UnusualForm::Tabs
                    | UnusualForm::FoldedClose
                    | UnusualForm::ReturnInConnection
            ),
        }
    }
}

/// Property of a request on which the framing of its response depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceRequestKind {
    /// The response is framed by its own headers.
    Plain,
    /// The response has no body.
    Head,
    /// A 2xx response switches the connection to another protocol.
    Connect,
}

/// Head of a request, as far as boundaries depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceHead {
    /// Offset in the stream at which the head ends.
    pub end: usize,
    /// Property on which the framing of the response depends.
    pub kind: ReferenceRequestKind,
    /// True if the server closes the connection after its response.
    pub closes: bool,
    /// True if the request itself contains the option `close`.
    pub says_close: bool,
    body: ReferenceBody,
}

impl ReferenceHead {
    /// Returns true if the body is in chunks (§7.1).
    pub fn is_chunked(&self) -> bool {
        self.body == ReferenceBody::Chunked
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReferenceBody {
    Sized(u64),
    Chunked,
}

/// Reason why reading stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceStop {
    /// The message continues beyond the bytes that are there.
    Short,
    /// The server refuses what it has read.
    Refused,
    /// The client wants no further response on this connection (§9.6).
    Closed,
}

/// Result of reading a stream of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReferenceRequests {
    /// Requests that arrived whole: their heads, and the offsets at which their bodies end.
    pub whole: Vec<(ReferenceHead, usize)>,
    /// Head of the last request, if its body is incomplete.
    pub partial_head: Option<ReferenceHead>,
    /// Reason why there are no more requests.
    pub stop: ReferenceStop,
    /// Offset up to which the server had read by then.
    pub at: usize,
    /// Unusual forms that were met, in order.
    pub unusual_forms: Vec<UnusualForm>,
}

/// Reads all requests in `bytes` as `server` does.
pub fn read_requests(bytes: &[u8], server: ServerProfile) -> ReferenceRequests {
    let mut reader = ReferenceReader::new(bytes, server);
    let mut whole = Vec::new();
    let (partial_head, stop) = loop {
        let head = match reader.read_head() {
            Ok(head) => head,
            Err(stop) => break (None, stop),
        };
        match reader.read_body(head.body) {
            Ok(()) => {
                whole.push((head, reader.at));
                if head.says_close {
                    break (None, ReferenceStop::Closed);
                }
            }
            Err(stop) => break (Some(head), stop),
        }
    };
    ReferenceRequests {
        whole,
        partial_head,
        stop,
        at: reader.at,
        unusual_forms: reader.unusual_forms,
    }
}

/// Returns the unusual forms in the responses to a request of this kind, read by a client that accepts all of them.
pub fn unusual_forms_of_response(bytes: &[u8], kind: ReferenceRequestKind) -> Vec<UnusualForm> {
    let mut reader = ReferenceReader::new(bytes, ServerProfile::Lax);
    // The form that breaks a response has been recorded before the error.
    let _whole_or_not = reader.read_response(kind);
    reader.unusual_forms
}
