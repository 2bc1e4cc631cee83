//! Shell: clients at their maximum rate: wrk for HTTP/1.1, h2load for HTTP/2.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::{cases::CountBenchCase, fixture::NetnsFixture};

/// Number of HTTP/1.1 connections, enough that neither side ever waits for the other.
const CONNECTIONS: u32 = 32;
/// Number of connections with bulk responses of a megabyte.
const BULK_CONNECTIONS: u32 = 4;
/// Number of HTTP/2 connections, and of streams on each.
pub(crate) const H2_CONNECTIONS: u32 = 4;
const STREAMS: u32 = 32;

/// Headers that a browser adds to a request, which then has about 700 bytes.
const BROWSER_HEADERS: [&str; 11] = [
    "User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36",
    "Accept: text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8",
    "Accept-Encoding: gzip, deflate, br, zstd",
    "Accept-Language: en-GB,en;q=0.9,de;q=0.8",
    "Cache-Control: max-age=0",
    "Cookie: session=0123456789abcdef0123456789abcdef; theme=dark; consent=all",
    "Sec-Ch-Ua: \"Chromium\";v=\"140\", \"Not=A?Brand\";v=\"24\"",
    "Sec-Fetch-Dest: document",
    "Sec-Fetch-Mode: navigate",
    "Sec-Fetch-Site: none",
    "Upgrade-Insecure-Requests: 1",
];

/// Results that a client reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadSummary {
    pub(crate) requests: u64,
    pub(crate) per_s: f64,
    /// Highest number of requests that were still in flight at the end, beyond those reported.
    pub(crate) max_unreported: u64,
}

/// Requests to send, and the client's namespace.
pub(crate) struct CountBenchLoad<'a> {
    pub(crate) case: CountBenchCase,
    pub(crate) from: &'a NetnsFixture,
    pub(crate) to: String,
    pub(crate) core: usize,
    pub(crate) seconds: u32,
    /// Number of requests for HTTP/2, whose client takes a number instead of a time.
    pub(crate) requests: u64,
}

impl CountBenchLoad<'_> {
    pub(crate) fn run(&self) -> Result<LoadSummary> {
        match self.case {
            CountBenchCase::H2 => self.h2load(),
            CountBenchCase::H1 | CountBenchCase::H1Browser | CountBenchCase::Bulk => self.wrk(),
        }
    }

    fn wrk(&self) -> Result<LoadSummary> {
        let connections =
            if self.case == CountBenchCase::Bulk { BULK_CONNECTIONS } else { CONNECTIONS };
        let mut args = vec!["wrk".to_owned(), "-t1".into(), format!("-c{connections}")];
        args.push(format!("-d{}", self.seconds));
        if self.case == CountBenchCase::H1Browser {
            args.extend(
                BROWSER_HEADERS.iter().flat_map(|header| ["-H".to_owned(), (*header).into()]),
            );
        }
        args.push(format!("http://{}{}", self.to, self.case.path()));
        let output = self.run_inside(&args)?;
        let has_errors = ["Socket errors", "Non-2xx"].iter().any(|word| output.contains(word));
        ensure!(!has_errors, "wrk met errors: {output}");
        let requests =
            parse_number(&output, |line| line.split_once(" requests in ")?.0.trim().parse().ok());
        let per_s =
            parse_number(&output, |line| line.strip_prefix("Requests/sec:")?.trim().parse().ok());
        Ok(LoadSummary {
            requests: requests? as u64,
            per_s: per_s?,
            max_unreported: u64::from(connections),
        })
    }

    fn h2load(&self) -> Result<LoadSummary> {
        let args = ["h2load", "-t1"].map(str::to_owned).into_iter();
        let args = args.chain([
            format!("-c{H2_CONNECTIONS}"),
            format!("-m{STREAMS}"),
            format!("-n{}", self.requests),
            format!("http://{}{}", self.to, self.case.path()),
        ]);
        let output = self.run_inside(&args.collect::<Vec<_>>())?;
        let result = parse_number(&output, |line| {
            let (before, _) = line.strip_prefix("requests: ")?.split_once(" succeeded")?;
            before.rsplit(' ').next()?.parse().ok()
        })?;
        ensure!(result as u64 == self.requests, "h2load met errors: {output}");
        let per_s = parse_number(&output, |line| {
            let (before, _) = line.strip_prefix("finished in ")?.split_once(" req/s")?;
            before.rsplit(' ').next()?.parse().ok()
        })?;
        Ok(LoadSummary { requests: self.requests, per_s, max_unreported: 0 })
    }

    /// Runs a program in the client's cgroup and network namespace, on the core.
    fn run_inside(&self, args: &[String]) -> Result<String> {
        let output = netns_command(self.from, self.core).args(args).stderr(Stdio::piped()).output();
        let done = output.context("cannot start sh")?;
        let output = String::from_utf8_lossy(&done.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{} failed: {output}{stderr}", args.join(" "));
        Ok(output)
    }
}

/// Command that enters a network namespace, its cgroup and a core; the program and its arguments are to be appended.
pub(crate) fn netns_command(netns: &NetnsFixture, core: usize) -> Command {
    let script = "echo $$ > \"$1\" && core=$2 netns=$3 && shift 3 \
                  && exec taskset -c \"$core\" ip netns exec \"$netns\" \"$@\"";
    let mut sh = Command::new("sh");
    sh.args(["-c", script, "sh"]).arg(netns.cgroup.join("cgroup.procs"));
    sh.arg(core.to_string()).arg(&netns.netns);
    sh
}

fn parse_number(output: &str, find: impl Fn(&str) -> Option<f64>) -> Result<f64> {
    output.lines().find_map(find).with_context(|| format!("no figure in: {output}"))
}
