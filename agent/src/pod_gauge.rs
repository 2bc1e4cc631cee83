//! Pure: gauges of a pod, as the eBPF programs keep them.

/// Number of gauges of a pod.
pub(crate) const GAUGE_COUNT: usize = 4;

/// Gauge of a pod in the eBPF programs' maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodGauge {
    /// Open connections of the pod.
    Connections,
    /// Requests in flight in the pod.
    InFlight,
    /// Connections without a request so far.
    Fresh,
    /// Opaque connections, whose requests are an estimate.
    Estimated,
}

impl PodGauge {
    /// All gauges, in the order of [`GaugeValues`].
    pub const ALL: [Self; GAUGE_COUNT] =
        [Self::Connections, Self::InFlight, Self::Fresh, Self::Estimated];

    /// Returns the gauge's name in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::InFlight => "in_flight",
            Self::Fresh => "fresh",
            Self::Estimated => "estimated",
        }
    }
}

/// Values of the gauges, in the order of [`PodGauge::ALL`]. A gauge with too many subtractions is below 0.
pub type GaugeValues = [i64; GAUGE_COUNT];

/// Gauges and totals of a pod, read at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GaugeReading {
    /// Values of the gauges.
    pub values: GaugeValues,
    /// Requests begun and ended so far.
    pub totals: [u64; 2],
}
