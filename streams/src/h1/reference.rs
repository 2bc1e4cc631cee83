//! Pure: where requests begin and end, straight from RFC 9112: slow, obvious, and written without a look at `common::h1`.
//!
//! Servers differ. Each point on which they do is an [`Odd`]; a [`Server`] takes some of those, and refuses the rest: 400,
//! or a like answer, and close. What the real ones take was found by asking each one that question.

mod reader;

use self::reader::Reader;

/// Something that some servers take and some refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Odd {
    /// A method with lower-case letters, digits or symbols behind its first letter.
    Method,
    /// A method that begins with no letter, or HTTP/2's own (RFC 9113 §11.6).
    Symbol,
    /// More than one space between the words of the request line, or one behind them.
    Spaces,
    /// A tab there.
    Tabs,
    /// A target with bytes outside printable ASCII.
    Target,
    /// HTTP/1.2 and later.
    Version,
    /// A line of the head that ends with a line feed alone.
    LineFeed,
    /// A carriage return inside a line.
    Return,
    /// A header line that goes on in the next.
    Fold,
    /// The option `close` with more of its word in the next line.
    FoldedClose,
    /// A carriage return inside a line of connection options: nginx ends the line there, others read it as a letter.
    ReturnedClose,
    /// A blank between a header's name and its colon.
    Blank,
    /// A header line without a colon.
    Colon,
    /// A header's name that is no token.
    Name,
    /// A control character in a header's value.
    Value,
    /// Content-Length twice, with the same number.
    Lengths,
    /// Content-Length as a list of the same numbers.
    LengthList,
    /// Content-Length beside Transfer-Encoding.
    Both,
    /// A coding before `chunked`.
    Codings,
    /// A byte beyond ASCII in a list of codings or of connection options.
    Letter,
    /// An empty element in the list of codings.
    NoCoding,
    /// Transfer-Encoding in HTTP/1.0.
    OldCoding,
    /// Blanks behind the size of a chunk.
    ChunkBlank,
    /// A chunk's size of more than 16 digits.
    ChunkZeros,
    /// A line feed alone behind a chunk's size, or behind its data.
    ChunkLineFeed,
    /// A trailer line that is no header line, or that ends with a line feed alone.
    Trailer,
    /// What a server of HTTP/2 begins with, behind a 101.
    Frame,
}

/// Who reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// Takes nothing odd.
    Strict,
    /// nginx 1.22.
    Nginx,
    /// `net/http` of Go 1.26.
    Go,
    /// Node 20.
    Node,
    /// Takes what anybody does.
    Lax,
}

impl Server {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Strict, Self::Nginx, Self::Go, Self::Node, Self::Lax];

    /// Whether it goes on where it meets this. What nobody sends and the kernel half does not follow is left out.
    fn takes(self, odd: Odd) -> bool {
        match self {
            Self::Strict => false,
            Self::Nginx => matches!(
                odd,
                Odd::Spaces
                    | Odd::Target
                    | Odd::Version
                    | Odd::LineFeed
                    | Odd::Name
                    | Odd::ChunkBlank
                    | Odd::ChunkZeros
                    | Odd::ChunkLineFeed
                    | Odd::Trailer
            ),
            Self::Go => matches!(
                odd,
                Odd::Method
                    | Odd::Target
                    | Odd::Version
                    | Odd::LineFeed
                    | Odd::Fold
                    | Odd::Lengths
                    | Odd::Both
                    | Odd::ChunkBlank
            ),
            Self::Node => matches!(odd, Odd::Spaces | Odd::Codings | Odd::ChunkZeros),
            Self::Lax => {
                !matches!(odd, Odd::Symbol | Odd::Tabs | Odd::FoldedClose | Odd::ReturnedClose)
            }
        }
    }
}

/// What the answer to a request depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing special.
    Plain,
    /// The answer has no body.
    Head,
    /// A 2xx answer opens a tunnel.
    Connect,
}

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Where it ends.
    pub end: usize,
    /// What its answer depends on.
    pub kind: Kind,
    /// The server closes when it has answered.
    pub closes: bool,
    /// The request says so itself.
    pub says_close: bool,
    body: Body,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Sized(u64),
    Chunked,
}

/// Why reading stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// More bytes are needed.
    Short,
    /// The server refuses what it has read.
    Refused,
    /// The client wants no more than this (§9.6).
    Closed,
}

/// What came of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requests {
    /// Requests that came whole: their heads, and where their bodies end.
    pub whole: Vec<(Head, usize)>,
    /// The head of one whose body did not.
    pub part: Option<Head>,
    /// Why there are no more.
    pub stop: Stop,
    /// How far the server had read then.
    pub at: usize,
    /// What was odd in what was taken.
    pub odd: Vec<Odd>,
}

/// Reads all requests in `bytes` as `server` does.
pub fn requests(bytes: &[u8], server: Server) -> Requests {
    let mut reader = Reader::new(bytes, server);
    let mut whole = Vec::new();
    let (part, stop) = loop {
        let head = match reader.head() {
            Ok(head) => head,
            Err(stop) => break (None, stop),
        };
        match reader.body(head.body) {
            Ok(()) => {
                whole.push((head, reader.at));
                if head.says_close {
                    break (None, Stop::Closed);
                }
            }
            Err(stop) => break (Some(head), stop),
        }
    };
    Requests { whole, part, stop, at: reader.at, odd: reader.odd }
}

/// What is odd in the answer to a request of this kind, for whoever takes all of it.
pub fn answer(bytes: &[u8], kind: Kind) -> Vec<Odd> {
    let mut reader = Reader::new(bytes, Server::Lax);
    // What is broken has been odd before.
    let _whole_or_not = reader.answer(kind);
    reader.odd
}
