//! Requests that `cargo xtask load` sends, and their results.

use std::collections::BTreeMap;
use std::process::Child;
use std::thread::JoinHandle;

use serde_json::Value;

/// A running load; killed on drop.
#[derive(Debug)]
pub struct LoadProcess {
    child: Child,
    /// Thread that reads its output at once: a load with a full pipe would stop sending.
    output: Option<JoinHandle<std::io::Result<String>>>,
}

impl LoadProcess {
    pub(crate) fn from_child(mut child: Child) -> Self {
        let out = child.stdout.take().expect("its output is piped");
        let output = std::thread::spawn(|| std::io::read_to_string(out));
        Self { child, output: Some(output) }
    }

    /// Waits for the end of the load, and returns all its requests.
    pub fn finish(mut self) -> Vec<LoadRequest> {
        let thread = self.output.take().expect("it is waited for once");
        let output = thread.join().expect("reading does not panic").expect("it is text");
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "the load generator ended badly: {status}");
        output.lines().map(LoadRequest::parse).collect()
    }
}

impl Drop for LoadProcess {
    fn drop(&mut self) {
        // After its end both calls do nothing.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// One request and its result.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// Time of sending, Unix time in µs.
    pub at_us: u64,
    /// Duration of the request, in µs.
    pub took_us: u64,
    /// HTTP status; 0 without a response.
    pub status: u16,
    /// Name of the pod that responded.
    pub pod: String,
    /// True if the request took the direct path.
    pub direct: bool,
    /// Reason that there is no response; empty if there is one.
    pub error: String,
}

impl LoadRequest {
    fn parse(line: &str) -> Self {
        let value: Value = serde_json::from_str(line).expect("each line is JSON");
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        Self {
            at_us: value["at_us"].as_u64().unwrap_or_default(),
            took_us: value["took_us"].as_u64().unwrap_or_default(),
            status: value["status"].as_u64().and_then(|it| it.try_into().ok()).unwrap_or_default(),
            pod: text("pod"),
            direct: value["direct"] == true,
            error: text("error"),
        }
    }

    /// Returns true if the application responded with success.
    pub fn is_answered(&self) -> bool {
        (200..300).contains(&self.status) && self.error.is_empty()
    }
}

/// Asserts that no request was lost, and that at least `min_sent` requests were sent.
pub fn assert_none_lost(requests: &[LoadRequest], min_sent: usize) {
    assert!(requests.len() >= min_sent, "only {} requests were sent", requests.len());
    let lost: Vec<&LoadRequest> = requests.iter().filter(|it| !it.is_answered()).collect();
    let first_lost = lost.get(..lost.len().min(10)).unwrap_or_default();
    let seconds = counts_by_second(requests);
    assert!(
        lost.is_empty(),
        "{} of {} lost: {first_lost:#?}\n(answered, lost) of each second: {seconds:?}",
        lost.len(),
        requests.len()
    );
}

/// Numbers of answered and lost requests, by the second of Unix time in which they were sent.
pub fn counts_by_second(requests: &[LoadRequest]) -> BTreeMap<u64, (u32, u32)> {
    let mut seconds = BTreeMap::<u64, (u32, u32)>::new();
    for request in requests {
        let (answered, lost) = seconds.entry(request.at_us / 1_000_000).or_default();
        *(if request.is_answered() { answered } else { lost }) += 1;
    }
    seconds
}
