//! Shell: the machine's clock and random numbers, as plain integers.

use std::{
    cell::Cell,
    hash::{BuildHasher as _, RandomState},
    sync::OnceLock,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// Unix time at the start plus monotonic time since, in ns. It goes back over a restart only if the system clock does.
pub fn now_ns() -> u64 {
    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    let (instant, unix_ns) = START.get_or_init(|| {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), u64::try_from(unix.as_nanos()).unwrap_or(0))
    });
    unix_ns + u64::try_from(instant.elapsed().as_nanos()).unwrap_or(u64::MAX - unix_ns)
}

/// Unix time in seconds.
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Random number, uniform over u64, for load balancing and trace ids, not for secrets (xorshift64*, Vigna 2014).
pub fn random_u64() -> u64 {
    thread_local! {
        static STATE: Cell<u64> = Cell::new(RandomState::new().hash_one(0u8) | 1);
    }
    STATE.with(|state| {
        let mut x = state.get();
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        state.set(x);
        x.wrapping_mul(0x2545_F491_4F6C_DD1D)
    })
}
