//! A request that a test holds in flight: it sends the body part by part, and sees what has come back until then.

use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::installed::Place;

/// A program that sends its input as a request's body and writes head and body of the answer as they come.
#[derive(Debug)]
pub struct Exchange {
    child: Child,
    input: Option<ChildStdin>,
    came: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
}

impl Exchange {
    /// Starts it by this command.
    pub fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut output = child.stdout.take().expect("piped");
        let came = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&came);
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend_from_slice(&bytes[..count]);
            }
        });
        let input = child.stdin.take();
        Self { child, input, came, reader: Some(reader) }
    }

    /// Uploads to `url` from `client`, and takes the answer at the same time; `version` is curl's word for one of HTTP.
    pub fn upload(client: &Place, url: &str, version: &str) -> Self {
        // Written to its output, an error cannot be taken for a good answer. With a limit of time curl would wait for its
        // input alone.
        let fixed = "--silent --include --no-buffer --noproxy * --header Expect: \
                     --write-out %{onerror}%{errormsg} --upload-file .";
        let fixed: Vec<&str> = ["curl"].into_iter().chain(fixed.split_whitespace()).collect();
        let mut command = client.command(&[&fixed[..], &[version, url]].concat());
        // As its input is not read to its end first, curl draws its progress, silent or not.
        command.stderr(Stdio::null());
        Self::start(command)
    }

    /// Sends a part of the body.
    pub fn send(&mut self, part: &str) {
        let input = self.input.as_mut().expect("it has not finished");
        // One that has ended is told apart by what came back.
        let _sent = input.write_all(part.as_bytes()).and_then(|()| input.flush());
    }

    /// All that has come back until now.
    pub fn came(&self) -> Vec<u8> {
        self.came.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The body's part of that; empty before the head has come.
    pub fn body(&self) -> Vec<u8> {
        let came = self.came();
        let end = came.windows(4).position(|four| four == b"\r\n\r\n");
        end.map(|end| came[end + 4..].to_vec()).unwrap_or_default()
    }

    /// A header's value; empty where there is none.
    pub fn header(&self, name: &str) -> String {
        let came = String::from_utf8_lossy(&self.came()).into_owned();
        let head = came.split("\r\n\r\n").next().unwrap_or_default();
        let mut lines = head.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(have, _)| have.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    }

    /// Ends the request's body.
    pub fn close(&mut self) {
        self.input = None;
    }

    /// How it ended, and once it has, all of it has come; `None` while it goes on.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().expect("it was started")?;
        self.reader.take().into_iter().for_each(|reader| reader.join().expect("it does not panic"));
        Some(status)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // No other test waits for one that a failed test leaves.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}
