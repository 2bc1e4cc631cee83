//! Shell: a simulated application: reads a request's body or not, responds early or late, in pieces.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    convert::Infallible,
    future::poll_fn,
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use crate::rng::SeededRng;

/// Request that the server has given to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimHttp1Call {
    /// Status of the response to it.
    pub status: u16,
    /// True once the whole response is written.
    pub is_done: bool,
    /// True if the response switches the connection to another protocol.
    pub is_upgraded: bool,
}

/// Simulated application, and all requests it was given.
#[derive(Debug)]
pub struct SimHttp1App {
    rng: RefCell<SeededRng>,
    calls: RefCell<Vec<SimHttp1Call>>,
    /// Number of steps that the application may take before the test allows more.
    steps: Cell<usize>,
    /// True if a response waits for a step.
    is_waiting: Cell<bool>,
}

impl SimHttp1App {
    /// An application that was given no request yet.
    pub fn new(rng: &mut SeededRng) -> Rc<Self> {
        Rc::new(Self {
            rng: RefCell::new(SeededRng::new(rng.next_u64())),
            calls: RefCell::default(),
            steps: Cell::new(0),
            is_waiting: Cell::new(false),
        })
    }

    /// All requests so far, in order.
    pub fn calls(&self) -> Vec<SimHttp1Call> {
        self.calls.borrow().clone()
    }

    /// Allows one more step. Returns true if a response waited for it.
    pub fn allow_step(&self) -> bool {
        self.steps.set(self.steps.get() + 1);
        self.is_waiting.replace(false)
    }

    fn poll_step(&self) -> Poll<()> {
        match self.steps.get() {
            0 => {
                self.is_waiting.set(true);
                Poll::Pending
            }
            left => {
                self.steps.set(left - 1);
                Poll::Ready(())
            }
        }
    }

    /// Responds to a request by a random plan.
    pub async fn respond(
        self: Rc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<SimResponseBody>, Infallible> {
        let plan = SimResponsePlan::new(&request, &mut self.rng.borrow_mut());
        let (status, is_upgraded) = (plan.status.as_u16(), plan.is_upgraded);
        let index = self.calls.borrow().len();
        self.calls.borrow_mut().push(SimHttp1Call { status, is_done: false, is_upgraded });
        if plan.waits.0 {
            poll_fn(|_| self.poll_step()).await;
        }
        let mut body = Some(request.into_body());
        match plan.reading {
            SimBodyReading::First => poll_fn(|context| poll_drained(&mut body, context)).await,
            SimBodyReading::Never => body = None,
            SimBodyReading::Between | SimBodyReading::Held => {}
        }
        let mut response = Response::new(SimResponseBody {
            request: body,
            reading: plan.reading,
            waits: plan.waits.1,
            pieces: plan.pieces,
            is_sized: plan.is_sized,
            trailers: plan.trailers,
            index,
            application: self,
        });
        *response.status_mut() = plan.status;
        if plan.closes {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    }
}

/// Time at which the application reads the body of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SimBodyReading {
    /// The application reads the body before the response begins.
    First,
    /// The application reads the body while it sends the response.
    Between,
    /// The application drops the body unread.
    Never,
    /// The application holds the body unread until the response ends.
    Held,
}

/// Random plan for one request.
#[derive(Debug)]
struct SimResponsePlan {
    reading: SimBodyReading,
    /// True if the head of the response waits for a step, and true if each piece of its body does.
    waits: (bool, bool),
    status: StatusCode,
    pieces: VecDeque<Bytes>,
    is_sized: bool,
    trailers: Option<HeaderMap>,
    closes: bool,
    is_upgraded: bool,
}

impl SimResponsePlan {
    fn new(request: &Request<Incoming>, rng: &mut SeededRng) -> Self {
        let may_upgrade = request.version() == Version::HTTP_11
            && request.headers().contains_key(header::UPGRADE);
        let status = match rng.next_below(12) {
            0 if may_upgrade => 101,
            0 => 201,
            1 => 204,
            2 => 304,
            3 => 404,
            4 => 503,
            _ => 200,
        };
        let grants = request.method() == Method::CONNECT && (200..300).contains(&status);
        let reading = match rng.next_below(20) {
            0 => SimBodyReading::Never,
            1 => SimBodyReading::Held,
            2..8 => SimBodyReading::Between,
            _ => SimBodyReading::First,
        };
        let pieces = (0..rng.next_length(12)).map(|_| {
            let len = 1 + rng.next_length(3_000);
            Bytes::from(
                b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"
                    .iter()
                    .copied()
                    .cycle()
                    .take(len)
                    .collect::<Vec<_>>(),
            )
        });
        let pieces = pieces.collect();
        let trailers = rng.next_bool(20).then(|| {
            HeaderMap::from_iter([(header::CONTENT_LENGTH, HeaderValue::from_static("9"))])
        });
        Self {
            reading,
            waits: (rng.next_bool(30), rng.next_bool(30)),
            status: StatusCode::from_u16(status).unwrap_or_default(),
            pieces,
            is_sized: rng.next_bool(50),
            trailers,
            closes: rng.next_bool(2),
            is_upgraded: status == 101 || grants,
        }
    }
}

/// Reads a body to its end, or to the error that ends it.
fn poll_drained(body: &mut Option<Incoming>, context: &mut Context<'_>) -> Poll<()> {
    while let Some(incoming) = body {
        match pin!(incoming).poll_frame(context) {
            Poll::Ready(Some(Ok(_))) => {}
            Poll::Ready(Some(Err(_)) | None) => *body = None,
            Poll::Pending => return Poll::Pending,
        }
    }
    Poll::Ready(())
}

/// Body of a response, sent as its plan says.
#[derive(Debug)]
pub struct SimResponseBody {
    request: Option<Incoming>,
    reading: SimBodyReading,
    waits: bool,
    pieces: VecDeque<Bytes>,
    is_sized: bool,
    trailers: Option<HeaderMap>,
    index: usize,
    application: Rc<SimHttp1App>,
}

impl Drop for SimResponseBody {
    fn drop(&mut self) {
        self.application.calls.borrow_mut()[self.index].is_done = true;
    }
}

impl Body for SimResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.pieces.len() <= 1 && self.reading == SimBodyReading::Between {
            std::task::ready!(poll_drained(&mut self.request, context));
        }
        if self.waits {
            std::task::ready!(self.application.poll_step());
        }
        let piece = self.pieces.pop_front().map(Frame::data);
        let frame = piece.or_else(|| self.trailers.take().map(Frame::trailers));
        Poll::Ready(frame.map(Ok))
    }

    fn size_hint(&self) -> SizeHint {
        let left = self.pieces.iter().map(|it| it.len() as u64).sum();
        if self.is_sized { SizeHint::with_exact(left) } else { SizeHint::default() }
    }
}
