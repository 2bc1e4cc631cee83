//! A request that a test keeps in flight: it sends the body part by part, and reads the response so far.

use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::client_pod::ClientPod;

/// A program that sends its input as a request's body, and prints head and body of the response as they arrive.
#[derive(Debug)]
pub struct StreamingExchange {
    child: Child,
    input: Option<ChildStdin>,
    received: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl StreamingExchange {
    /// Starts the exchange by this command.
    pub fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut output = child.stdout.take().expect("piped");
        let received = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&received);
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                let mut received = shared.lock().unwrap_or_else(PoisonError::into_inner);
                received.extend_from_slice(&bytes[..count]);
            }
        });
        let input = child.stdin.take();
        Self { child, input, received, reader: Some(reader) }
    }

    /// Uploads to `url` from `client` while receiving the response; `version` is curl's option for the HTTP version.
    pub fn upload(client: &ClientPod, url: &str, version: &str) -> Self {
        // With the error on its output, a failure cannot look like a complete response. With a time limit, curl would
        // wait for its input alone.
        let fixed = "--silent --include --no-buffer --noproxy * --header Expect: \
                     --write-out %{onerror}%{errormsg} --upload-file .";
        let fixed: Vec<&str> = ["curl"].into_iter().chain(fixed.split_whitespace()).collect();
        let mut command = client.command(&[&fixed[..], &[version, url]].concat());
        // curl draws its progress when its input is not read to the end first, even with --silent.
        command.stderr(Stdio::null());
        Self::start(command)
    }

    /// Sends a part of the body.
    pub fn send_part(&mut self, part: &str) {
        let input = self.input.as_mut().expect("it has not finished");
        // A failed write is ignored: the test detects an ended exchange by its output.
        let _sent = input.write_all(part.as_bytes()).and_then(|()| input.flush());
    }

    /// All bytes of the response so far.
    pub fn received(&self) -> Vec<u8> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Body of the response so far; empty before the head is complete.
    pub fn body(&self) -> Vec<u8> {
        let received = self.received();
        let head_end = received.windows(4).position(|window| window == b"\r\n\r\n");
        head_end.map(|head_end| received[head_end + 4..].to_vec()).unwrap_or_default()
    }

    /// Value of a response header; empty if there is none.
    pub fn header(&self, name: &str) -> String {
        let received = String::from_utf8_lossy(&self.received()).into_owned();
        let head = received.split("\r\n\r\n").next().unwrap_or_default();
        let mut lines = head.lines().filter_map(|line| line.split_once(':'));
        let header_line = lines.find(|(key, _)| key.eq_ignore_ascii_case(name));
        header_line.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    }

    /// Ends the body of the request.
    pub fn end_body(&mut self) {
        self.input = None;
    }

    /// Exit status of the program, after which the response is complete; `None` while it runs.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().expect("it was started")?;
        self.reader.take().into_iter().for_each(|reader| reader.join().expect("it does not panic"));
        Some(status)
    }
}

impl Drop for StreamingExchange {
    fn drop(&mut self) {
        // A failed test must not leave a program that other tests wait for.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}
