//! Pure: request metrics by host and Revision, with a bound on the rows.
//!
//! Each combination of labels has a row. A table with too many of them would fill each scrape, so further ones share the
//! row `other`. A row that was not used for a while makes room for a new one. Its figures then move to `other`, so that
//! the sum of all rows never falls.

use std::collections::HashMap;

use smol_str::SmolStr;

/// Bounds of the buckets of durations in seconds: those of `http.server.request.duration` in OpenTelemetry's
/// conventions.
pub const DURATION_BOUNDS_S: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
/// Bounds of the buckets of sizes in bytes: OpenTelemetry's default ones, which Knative has here.
pub const SIZE_BOUNDS: [f64; 15] = [
    0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0,
    10_000.0,
];
/// Maximum number of rows besides `other`.
pub const MAX_ROWS: usize = 2000;
/// Value of each label of the row `other`.
pub const OTHER: &str = "other";
/// Description of the durations.
pub const DURATION_HELP: &str =
    "Duration of requests, from their arrival to the end of the response";
/// Description of the sizes.
pub const SIZE_HELP: &str = "Bytes of the bodies of responses that were passed on";
/// Time without requests after which a row may make room for another one, in seconds.
const MIN_UNUSED_S: u64 = 600;

/// Labels of a row. All but the method's and the status's values come from the RouteTable, so clients cannot invent any.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowLabels {
    /// Namespace of the Revision; empty: no service was found.
    pub namespace: SmolStr,
    /// Service that owns the Revision; empty: none.
    pub service: SmolStr,
    /// Configuration that made the Revision; empty: no service was found.
    pub configuration: SmolStr,
    /// Name of the Revision; empty: no service was found.
    pub revision: SmolStr,
    /// Host by which the service was found, `*.` included; empty: no service was found.
    pub host: SmolStr,
    /// Method of the request, `_OTHER` for unknown ones.
    pub method: &'static str,
    /// `https` if the connection to the activator has TLS, else `http`.
    pub scheme: &'static str,
    /// Version of HTTP that the client speaks.
    pub version: &'static str,
    /// Status code; 499: the client was gone before the response began.
    pub status: u16,
}

/// Distribution of values over buckets, with their sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    /// Upper bounds of the buckets, in the order of their size.
    pub bounds: &'static [f64],
    /// Number of values in each bucket. The last one has no bound.
    pub buckets: Box<[u64]>,
    /// Sum of all values.
    pub sum: f64,
    /// Number of values in all buckets.
    pub count: u64,
}

impl Distribution {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, buckets: vec![0; bounds.len() + 1].into_boxed_slice(), sum: 0.0, count: 0 }
    }

    fn observe(&mut self, value: f64) {
        let at = self.bounds.iter().position(|bound| value <= *bound);
        self.buckets[at.unwrap_or(self.bounds.len())] += 1;
        self.sum += value;
        self.count += 1;
    }

    /// Adds the values of a distribution with the same bounds.
    fn add(&mut self, other: &Self) {
        for (sum, more) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *sum += more;
        }
        self.sum += other.sum;
        self.count += other.count;
    }
}

/// Figures of one finished request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestFigures {
    /// Time from its arrival to the end of the response, in seconds.
    pub duration_s: f64,
    /// Bytes of the response's body that were passed on.
    pub response_bytes: u64,
}

/// Figures of the requests with the same labels.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRow {
    /// Durations of the requests in seconds.
    pub durations: Distribution,
    /// Sizes of the responses' bodies in bytes.
    pub response_sizes: Distribution,
    /// Time of the last request in seconds.
    last_used_s: u64,
}

impl Default for RequestRow {
    fn default() -> Self {
        Self {
            durations: Distribution::new(&DURATION_BOUNDS_S),
            response_sizes: Distribution::new(&SIZE_BOUNDS),
            last_used_s: 0,
        }
    }
}

impl RequestRow {
    fn observe(&mut self, now_s: u64, figures: RequestFigures) {
        self.durations.observe(figures.duration_s);
        self.response_sizes.observe(figures.response_bytes as f64);
        self.last_used_s = now_s;
    }

    fn add(&mut self, other: &Self) {
        self.durations.add(&other.durations);
        self.response_sizes.add(&other.response_sizes);
    }
}

/// Rows of all requests, of a bounded number.
#[derive(Clone, Debug)]
pub struct RequestRows {
    rows: HashMap<RowLabels, RequestRow>,
    /// Sum of the requests without a row of their own; `None`: there was none yet.
    other: Option<RequestRow>,
    max_rows: usize,
    /// Time before which no row can make room: a search each time would be slow while many labels are new.
    next_search_s: u64,
}

impl Default for RequestRows {
    fn default() -> Self {
        Self::with_max_rows(MAX_ROWS)
    }
}

impl RequestRows {
    /// Creates a table that holds at most `max_rows` rows besides `other`.
    pub fn with_max_rows(max_rows: usize) -> Self {
        Self { rows: HashMap::new(), other: None, max_rows, next_search_s: 0 }
    }

    /// Counts one finished request. `now_s` never goes back.
    pub fn observe(&mut self, now_s: u64, labels: RowLabels, figures: RequestFigures) {
        if let Some(row) = self.rows.get_mut(&labels) {
            return row.observe(now_s, figures);
        }
        if self.rows.len() >= self.max_rows && !self.make_room(now_s) {
            return self.other.get_or_insert_default().observe(now_s, figures);
        }
        self.rows.entry(labels).or_default().observe(now_s, figures);
    }

    /// Moves the row that is unused for longest to `other`. Returns false if all rows are in use.
    fn make_room(&mut self, now_s: u64) -> bool {
        if now_s < self.next_search_s {
            return false;
        }
        let oldest = self.rows.iter().min_by_key(|(_, row)| row.last_used_s);
        let Some((labels, last_used_s)) =
            oldest.map(|(labels, row)| (labels.clone(), row.last_used_s))
        else {
            return false;
        };
        if now_s.saturating_sub(last_used_s) < MIN_UNUSED_S {
            // The search reads all rows, so it takes place once a second at most.
            self.next_search_s = now_s + 1;
            return false;
        }
        if let Some(row) = self.rows.remove(&labels) {
            self.other.get_or_insert_default().add(&row);
        }
        true
    }

    /// All rows with their labels; `None` stands for `other`.
    pub fn rows(&self) -> impl Iterator<Item = (Option<&RowLabels>, &RequestRow)> {
        let rows = self.rows.iter().map(|(labels, row)| (Some(labels), row));
        rows.chain(self.other.iter().map(|row| (None, row)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIGURES: RequestFigures = RequestFigures { duration_s: 0.1, response_bytes: 5 };

    fn labels(host: &str) -> RowLabels {
        RowLabels {
            namespace: "default".into(),
            service: "hello".into(),
            configuration: "hello".into(),
            revision: "hello-1".into(),
            host: host.into(),
            method: "GET",
            scheme: "http",
            version: "1.1",
            status: 200,
        }
    }

    /// Returns host and count of each row, in order; `other` for the shared row.
    fn counts(rows: &RequestRows) -> Vec<(String, u64)> {
        let name = |labels: Option<&RowLabels>| {
            labels.map_or_else(|| OTHER.to_owned(), |it| it.host.to_string())
        };
        let mut all: Vec<_> =
            rows.rows().map(|(it, row)| (name(it), row.durations.count)).collect();
        all.sort();
        all
    }

    #[test]
    fn a_request_counts_in_the_bucket_of_its_duration() {
        let mut rows = RequestRows::default();
        for duration_s in [0.005, 0.006, 11.0] {
            rows.observe(1, labels("a"), RequestFigures { duration_s, response_bytes: 5 });
        }
        let (_, row) = rows.rows().next().expect("a row");
        let mut expected = [0; DURATION_BOUNDS_S.len() + 1];
        expected[0] = 1;
        expected[1] = 1;
        expected[DURATION_BOUNDS_S.len()] = 1;
        assert_eq!((&row.durations.buckets[..], row.durations.count), (&expected[..], 3));
        let sizes = &row.response_sizes;
        assert_eq!((sizes.buckets[1], sizes.sum, sizes.count), (3, 15.0, 3));
    }

    #[test]
    fn labels_beyond_the_bound_share_a_row() {
        let mut rows = RequestRows::with_max_rows(2);
        for host in ["a", "b", "c", "d", "a"] {
            rows.observe(1, labels(host), FIGURES);
        }
        let one = |name: &str, count| (name.to_owned(), count);
        assert_eq!(counts(&rows), [one("a", 2), one("b", 1), one("other", 2)]);
    }

    #[test]
    fn an_unused_row_makes_room_and_no_request_is_lost_from_the_sum() {
        let mut rows = RequestRows::with_max_rows(2);
        rows.observe(0, labels("a"), FIGURES);
        rows.observe(MIN_UNUSED_S - 1, labels("b"), FIGURES);
        rows.observe(MIN_UNUSED_S - 1, labels("c"), FIGURES);
        rows.observe(MIN_UNUSED_S, labels("d"), FIGURES);
        let one = |name: &str, count| (name.to_owned(), count);
        assert_eq!(counts(&rows), [one("b", 1), one("d", 1), one("other", 2)]);
        let total: u64 = rows.rows().map(|(_, row)| row.durations.count).sum();
        assert_eq!(total, 4);
    }
}
