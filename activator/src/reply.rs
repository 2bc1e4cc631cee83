//! Shell: the body of an answer, carried from the pod to the client as it comes.
//!
//! A bound that is over after the answer has begun ends it in Knative's way (`pkg/http/handler/timeout.go`): the code
//! stays, the text of the failure is appended, and the answer ends. One whose length was promised cannot end before it:
//! it is cut off behind the text, or without it where the text would not fit.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tracing::warn;

use crate::{
    connection::{Answer, PodError},
    failure::Failure,
    request_log::Entry,
    revision::{Place, Timeouts},
};

/// Body of an answer.
#[derive(Debug)]
pub enum Reply {
    /// Our own words, until they are sent.
    Own(Option<Bytes>),
    /// A pod's.
    Pod(Box<FromPod>),
    /// Either of them, and its request leaves a line.
    Logged(Box<Logged>),
}

/// A body whose end ends its entry in the log of requests.
#[derive(Debug)]
pub struct Logged {
    reply: Reply,
    entry: Box<Entry>,
}

/// Why an answer that had begun was cut off.
#[derive(Debug, thiserror::Error)]
pub enum CutOff {
    /// The pod broke it off.
    #[error("answer of pod broke off")]
    Pod(#[source] PodError),
    /// A bound of the revision was over.
    #[error("activator request timeout")]
    Timeout,
    /// Nobody listens any more.
    #[error("client has gone")]
    Client,
}

/// One request's clock: a single timer, set to whichever bound is over first.
#[derive(Debug)]
pub struct Timer {
    sleep: Pin<Box<Sleep>>,
    whole: Instant,
    start: Option<Instant>,
    idle: Option<Duration>,
}

impl Timer {
    /// Starts now.
    pub fn start(timeouts: Timeouts) -> Self {
        let now = Instant::now();
        let whole = now + timeouts.whole;
        let first = [timeouts.start, timeouts.idle].into_iter().flatten().min();
        let until = first.map_or(whole, |it| whole.min(now + it));
        let start = timeouts.start.map(|it| now + it);
        let sleep = Box::pin(tokio::time::sleep_until(until));
        Self { sleep, whole, start, idle: timeouts.idle }
    }

    /// Waits until a bound is over.
    pub async fn expired(&mut self) {
        self.sleep.as_mut().await;
    }

    /// When the whole request has to be over.
    pub fn whole(&self) -> Instant {
        self.whole
    }

    /// When the first byte has to have come.
    pub fn start_by(&self) -> Option<Instant> {
        self.start
    }

    /// How long nothing may be said.
    pub fn idle(&self) -> Option<Duration> {
        self.idle
    }

    /// The answer has begun: from here on only the whole and the idle bound count.
    fn answered(&mut self) {
        let until = self.idle.map_or(self.whole, |it| self.whole.min(Instant::now() + it));
        if until != self.sleep.deadline() {
            self.sleep.as_mut().reset(until);
        }
    }
}

/// A pod's body, with what has to be given back once it has ended.
#[derive(Debug)]
pub struct FromPod {
    body: Answer,
    timer: Timer,
    place: Option<Arc<Place>>,
    end: End,
}

/// How an answer ends whose time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is not over.
    Open,
    /// All is said.
    Whole,
    /// The text is said, and has to leave before the connection breaks.
    Said,
    /// Nothing can be added to what was promised.
    Broken,
}

impl Reply {
    /// Our own words.
    pub fn own(text: impl Into<Bytes>) -> Self {
        Self::Own(Some(text.into()).filter(|text: &Bytes| !text.is_empty()))
    }

    /// A pod's body; its connection and place are given back at its end.
    pub fn pod(body: Answer, mut timer: Timer, place: Arc<Place>) -> Self {
        timer.answered();
        let mut reply = FromPod { body, timer, place: Some(place), end: End::Open };
        if reply.body.is_end() {
            reply.finish();
            return Self::Own(None);
        }
        Self::Pod(Box::new(reply))
    }

    /// The same, and its request leaves a line once it has been passed on.
    pub fn logged(self, entry: Box<Entry>) -> Self {
        Self::Logged(Box::new(Logged { reply: self, entry }))
    }
}

impl Reply {
    /// Bytes of it at most that may lie here before they are asked for.
    pub fn ahead(&self) -> usize {
        match self {
            Self::Own(_) => 0,
            Self::Pod(reply) => {
                let upper = reply.body.size_hint().upper();
                let upper = upper.and_then(|it| usize::try_from(it).ok()).unwrap_or(usize::MAX);
                reply.body.ahead().min(upper)
            }
            Self::Logged(logged) => logged.reply.ahead(),
        }
    }

    /// Tells the pod that its client has closed its sending half. `false`: it cannot be told.
    pub fn pass_fin(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Pod(reply) => reply.body.pass_fin(cx),
            Self::Logged(logged) => logged.reply.pass_fin(cx),
        }
    }
}

impl Logged {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        let next = ready!(Pin::new(&mut self.reply).poll_frame(cx));
        if let Some(Ok(frame)) = &next {
            self.entry.passed_on(frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(next)
    }
}

impl FromPod {
    /// The exchange has ended in order: the connection may be used again.
    fn finish(&mut self) {
        let connection = self.body.end();
        if let (Some(place), Some(connection)) = (self.place.take(), connection) {
            Arc::clone(&place.pod).give_back(connection);
        }
    }

    /// The exchange is broken off: the connection ends with it.
    fn give_up(&mut self) {
        self.body = Answer::Ended;
        self.place = None;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        match self.end {
            End::Open => {}
            End::Whole => return Poll::Ready(None),
            End::Said => {
                self.end = End::Broken;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            End::Broken => return Poll::Ready(Some(Err(CutOff::Timeout))),
        }
        let Poll::Ready(next) = self.body.poll_frame(cx) else {
            ready!(self.timer.sleep.as_mut().poll(cx));
            return Poll::Ready(Some(self.time_out()));
        };
        match &next {
            Some(Ok(_)) if self.body.is_end() => self.finish(),
            Some(Ok(_)) if self.timer.idle.is_some() => self.timer.answered(),
            Some(Ok(_)) => {}
            Some(Err(_)) => self.give_up(),
            None => self.finish(),
        }
        Poll::Ready(next.map(|frame| frame.map_err(CutOff::Pod)))
    }

    /// Says that a bound is over, as far as there is room for it.
    fn time_out(&mut self) -> Result<Frame<Bytes>, CutOff> {
        if let Some(place) = &self.place {
            warn!(pod = %place.pod.uid, "answer cut off: request timeout");
        }
        let text = Failure::Timeout.to_string();
        self.end = match self.body.size_hint().exact() {
            None => End::Whole,
            Some(room) if room < text.len() as u64 => End::Broken,
            Some(_) => End::Said,
        };
        self.give_up();
        match self.end {
            End::Open | End::Broken => Err(CutOff::Timeout),
            End::Whole | End::Said => Ok(Frame::data(text.into())),
        }
    }

    fn is_ended(&self) -> bool {
        match self.end {
            End::Open => self.body.is_end(),
            End::Whole => true,
            End::Said | End::Broken => false,
        }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = CutOff;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, CutOff>>> {
        match self.get_mut() {
            Self::Own(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Self::Pod(reply) => reply.poll(cx),
            Self::Logged(logged) => logged.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(text) => text.is_none(),
            Self::Pod(reply) => reply.is_ended(),
            Self::Logged(logged) => logged.reply.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(text) => SizeHint::with_exact(
                text.as_ref().map_or(0, |text| u64::try_from(text.len()).unwrap_or(u64::MAX)),
            ),
            Self::Pod(reply) => reply.body.size_hint(),
            Self::Logged(logged) => logged.reply.size_hint(),
        }
    }
}
