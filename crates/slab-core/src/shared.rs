//! One lock around a pool and the state of whoever uses it.
//!
//! Inside the lock there are only raw tokens; a guard is made when a token leaves. A guard that is
//! dropped inside the lock after all (because the caller's state owned it) does not lock again: its
//! token goes to a side list that the holder empties before it unlocks.
//!
//! A panic in a caller's closure does not disable the pool: its methods finish or have not begun when
//! user code runs, so the pool is consistent, and the lock is taken over. The caller's own state is the
//! caller's to check ([`SharedPool::is_poisoned`]).

mod guard;

use alloc::vec::Vec;
use core::borrow::Borrow;
use core::fmt;
use core::hash::{BuildHasher, Hash};
use std::hash::RandomState;
use std::time::Instant;

use crate::error::{Error, Refused};
use crate::evict::{Credit, Evict};
use crate::id::PoolId;
use crate::pool::Pool;
use crate::region::Allocation;
use crate::resident::Lease;
use crate::store::Heap;
use crate::sync::{
    Arc, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, PoisonError, thread_mark,
};
use crate::twin::{Twin, is_left_out};

pub use guard::{AllocationGuard, LeaseGuard};

/// A [`Pool`] and the caller's state `X` behind one lock. Cloning gives another handle to the same.
///
/// Under the lock belongs bounded work only: no I/O, no engine call, no hashing of bytes.
///
/// The state should hold raw tokens, not guards: a guard keeps the pool alive, so a state that owns guards
/// of its own pool is never dropped. Guards of one pool dropped inside the lock of another take both locks,
/// so do that in one order only.
///
/// ```
/// use slab_core::{Pool, PoolConfig, PoolId, Reserve, SharedPool};
///
/// # fn main() -> Result<(), slab_core::Error> {
/// let pool = Pool::new(PoolConfig::new(PoolId::new(), 4096))?;
/// let shared = SharedPool::new(pool, 0u32);
/// let lease = shared.with(|pool, published| {
///     let Reserve::Ready(bytes) = pool.reserve(100) else { panic!("the pool is empty") };
///     *published += 1;
///     pool.publish("a", bytes, ()).expect("a token of this pool")
/// });
/// let guard = shared.lease_guard(lease).expect("a token of this pool");
/// assert_eq!(shared.with(|pool, _| pool.lease_count("a")), Some(1));
/// drop(guard);
/// assert_eq!(shared.with(|pool, _| pool.lease_count("a")), Some(0));
/// # Ok(())
/// # }
/// ```
pub struct SharedPool<K, M, X = (), S = RandomState, E: Evict = Credit> {
    home: Arc<Home<K, M, X, S, E>>,
}

struct Home<K, M, X, S, E: Evict> {
    id: PoolId,
    inner: Mutex<Inner<K, M, X, S, E>>,
    changed: Condvar,
    /// Mark of the thread that is inside the lock, 0 if none is.
    holder: AtomicUsize,
    /// Tokens of guards that were dropped inside the lock.
    returned: Mutex<Vec<Token>>,
}

struct Inner<K, M, X, S, E: Evict> {
    pool: Pool<K, M, S, Heap, E>,
    state: X,
    /// Threads in `changed`: nobody is notified in vain.
    waiters: usize,
}

/// A token on its way back to the pool.
enum Token {
    Lease(Lease),
    Allocation(Allocation),
}

/// What a guard needs of its pool, whatever the pool's types.
trait TakeBack: Send + Sync {
    /// Takes a token back; from inside the lock, before the lock is left.
    fn take_back(&self, token: Token);
    /// Runs a fallible give-back under the lock.
    fn give_with(&self, give: GiveBack<'_>) -> Result<(), Refused<Token>>;
}

/// A way to give a token back that can be refused.
enum GiveBack<'a> {
    Release(Lease, &'a [crate::Fence]),
    Free(Allocation, &'a [crate::Fence]),
    Quarantine(Allocation),
}

impl<K, M, X, S, E> SharedPool<K, M, X, S, E>
where
    K: Eq + Hash,
    S: BuildHasher,
    E: Evict,
{
    /// Puts the lock around a pool and the state that belongs to it.
    #[must_use]
    pub fn new(pool: Pool<K, M, S, Heap, E>, state: X) -> Self {
        let home = Home {
            id: pool.id(),
            inner: Mutex::new(Inner {
                pool,
                state,
                waiters: 0,
            }),
            changed: Condvar::new(),
            holder: AtomicUsize::new(0),
            returned: Mutex::new(Vec::new()),
        };
        Self {
            home: Arc::new(home),
        }
    }

    /// Runs `body` under the lock, then wakes every thread in [`wait_until`](Self::wait_until).
    ///
    /// # Complexity
    /// The body's, and that of giving back each guard that was dropped in it. Nobody is notified where nobody waits.
    ///
    /// # Panics
    /// If the calling thread is inside the lock already.
    pub fn with<R>(&self, body: impl FnOnce(&mut Pool<K, M, S, Heap, E>, &mut X) -> R) -> R {
        let mut held = self.home.lock();
        let inner = held.inner();
        body(&mut inner.pool, &mut inner.state)
    }

    /// Runs `body` under the lock until it answers `Some`: at once, after each [`with`](Self::with) of
    /// another thread, and once more when `deadline` has passed; then `None`. Without a deadline it waits
    /// for ever.
    ///
    /// While `body` answers `None` nobody is woken, so it should change nothing then that others wait for.
    ///
    /// # Complexity
    /// The body's, once for each time that another thread leaves the lock.
    ///
    /// # Panics
    /// If the calling thread is inside the lock already.
    pub fn wait_until<R>(
        &self,
        deadline: Option<Instant>,
        mut body: impl FnMut(&mut Pool<K, M, S, Heap, E>, &mut X) -> Option<R>,
    ) -> Option<R> {
        let mut held = self.home.lock();
        loop {
            let now = Instant::now();
            let inner = held.inner();
            let answer = body(&mut inner.pool, &mut inner.state);
            if answer.is_some() || deadline.is_some_and(|deadline| deadline <= now) {
                return answer;
            }
            // A guard dropped in `body` gave bytes back: look again before sleeping.
            if !held.take_returned() || is_left_out(Twin::LookAgain) {
                held.wait(deadline);
            }
        }
    }

    /// Wraps a lease that leaves the lock, so that dropping it releases it. Does not lock.
    ///
    /// # Errors
    /// [`Error::ForeignToken`], with the lease, if another pool made it.
    pub fn lease_guard(&self, lease: Lease) -> Result<LeaseGuard, Refused<Lease>>
    where
        K: Send + 'static,
        M: Send + 'static,
        X: Send + 'static,
        S: Send + 'static,
        E: Evict<Rank: Send> + Send + 'static,
    {
        match self.check(lease.pool()) {
            Ok(()) => Ok(LeaseGuard::new(self.home.clone(), lease)),
            Err(cause) => Err(Refused {
                value: lease,
                cause,
            }),
        }
    }

    /// Wraps an allocation that leaves the lock, so that dropping it frees the bytes at once. Does not lock.
    ///
    /// # Errors
    /// [`Error::ForeignToken`], with the allocation, if another pool made it.
    pub fn allocation_guard(
        &self,
        allocation: Allocation,
    ) -> Result<AllocationGuard, Refused<Allocation>>
    where
        K: Send + 'static,
        M: Send + 'static,
        X: Send + 'static,
        S: Send + 'static,
        E: Evict<Rank: Send> + Send + 'static,
    {
        match self.check(allocation.pool()) {
            Ok(()) => Ok(AllocationGuard::new(self.home.clone(), allocation)),
            Err(cause) => Err(Refused {
                value: allocation,
                cause,
            }),
        }
    }

    /// Borrows the resident of `key`, or returns `None` if there is none. O(1) expected, under the lock.
    ///
    /// # Panics
    /// If the calling thread is inside the lock already.
    #[must_use]
    pub fn acquire<Q>(&self, key: &Q) -> Option<LeaseGuard>
    where
        K: Borrow<Q> + Send + 'static,
        Q: Eq + Hash + ?Sized,
        M: Send + 'static,
        X: Send + 'static,
        S: Send + 'static,
        E: Evict<Rank: Send> + Send + 'static,
    {
        let lease = self.with(|pool, _| pool.acquire(key))?;
        Some(LeaseGuard::new(self.home.clone(), lease))
    }

    /// The id its tokens carry.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.home.id
    }

    /// Whether the calling thread is inside the lock, so that most methods here and of guards would panic. O(1), does
    /// not lock.
    #[must_use]
    pub fn is_inside(&self) -> bool {
        self.home.is_held_here()
    }

    /// Whether a closure has panicked under the lock.
    #[cfg(not(slab_loom))] // loom's lock does not know
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.home.inner.is_poisoned()
    }

    fn check(&self, token: PoolId) -> Result<(), Error> {
        let pool = self.home.id;
        if token == pool {
            Ok(())
        } else {
            Err(Error::ForeignToken { token, pool })
        }
    }
}

impl<K, M, X, S, E: Evict> Clone for SharedPool<K, M, X, S, E> {
    fn clone(&self) -> Self {
        Self {
            home: Arc::clone(&self.home),
        }
    }
}

impl<K, M, X, S, E: Evict> fmt::Debug for SharedPool<K, M, X, S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Does not lock: a debug print under the lock must not stop the program.
        f.debug_struct("SharedPool")
            .field("id", &self.home.id)
            .finish_non_exhaustive()
    }
}

impl<K: Eq + Hash, M, X, S: BuildHasher, E: Evict> Home<K, M, X, S, E> {
    fn lock(&self) -> Held<'_, K, M, X, S, E> {
        assert!(
            !self.is_held_here(),
            "the pool's lock was asked for by the thread that is inside it"
        );
        let guard = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        self.holder.store(thread_mark(), Ordering::Relaxed);
        Held {
            home: self,
            guard: Some(guard),
        }
    }

    /// Whether the calling thread is inside the lock. Relaxed is enough: only this thread writes its own
    /// mark, and it erases it before it unlocks.
    fn is_held_here(&self) -> bool {
        self.holder.load(Ordering::Relaxed) == thread_mark()
    }
}

impl<K, M, X, S, E> TakeBack for Home<K, M, X, S, E>
where
    K: Eq + Hash + Send,
    M: Send,
    X: Send,
    S: BuildHasher + Send,
    E: Evict<Rank: Send> + Send,
{
    fn take_back(&self, token: Token) {
        if self.is_held_here() {
            self.returned
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(token);
        } else {
            self.lock().inner().pool.take_back(token);
        }
    }

    fn give_with(&self, give: GiveBack<'_>) -> Result<(), Refused<Token>> {
        let mut held = self.lock();
        let pool = &mut held.inner().pool;
        match give {
            GiveBack::Release(lease, fences) => {
                pool.release(lease, fences)
                    .map_err(|Refused { value, cause }| Refused {
                        value: Token::Lease(value),
                        cause,
                    })
            }
            GiveBack::Free(allocation, fences) => {
                pool.free(allocation, fences)
                    .map_err(|Refused { value, cause }| Refused {
                        value: Token::Allocation(value),
                        cause,
                    })
            }
            GiveBack::Quarantine(allocation) => {
                pool.quarantine(allocation)
                    .map_err(|Refused { value, cause }| Refused {
                        value: Token::Allocation(value),
                        cause,
                    })
            }
        }
    }
}

impl<K: Eq + Hash, M, S: BuildHasher, E: Evict> Pool<K, M, S, Heap, E> {
    /// Takes the token of a guard back. The guard checked the pool, so only a second pool with the same
    /// id could refuse; nobody is there to hand the token to, and to leak it is safe.
    fn take_back(&mut self, token: Token) {
        match token {
            Token::Lease(lease) => drop(self.release(lease, &[])),
            Token::Allocation(allocation) => drop(self.free(allocation, &[])),
        }
    }
}

type Guard<'a, K, M, X, S, E> = MutexGuard<'a, Inner<K, M, X, S, E>>;

/// The lock, held. Leaving it takes back what was dropped inside and wakes the waiters, on unwinding too.
struct Held<'a, K: Eq + Hash, M, X, S: BuildHasher, E: Evict> {
    home: &'a Home<K, M, X, S, E>,
    /// Empty only while the thread sleeps in `wait`.
    guard: Option<Guard<'a, K, M, X, S, E>>,
}

impl<K: Eq + Hash, M, X, S: BuildHasher, E: Evict> Held<'_, K, M, X, S, E> {
    fn inner(&mut self) -> &mut Inner<K, M, X, S, E> {
        self.guard
            .as_deref_mut()
            .expect("the lock is held outside `wait`")
    }

    /// Takes back the tokens of guards that were dropped inside the lock. False if there were none.
    fn take_returned(&mut self) -> bool {
        let returned = core::mem::take(
            &mut *self
                .home
                .returned
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        let any = !returned.is_empty();
        for token in returned {
            self.inner().pool.take_back(token);
        }
        any
    }

    /// Sleeps until another thread leaves the lock or the deadline passes. May wake early.
    fn wait(&mut self, deadline: Option<Instant>) {
        let Some(mut guard) = self.guard.take() else {
            return;
        };
        let home = self.home;
        guard.waiters += 1;
        home.holder.store(0, Ordering::Relaxed);
        let mut guard = match deadline {
            None => home
                .changed
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                home.changed
                    .wait_timeout(guard, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        if !is_left_out(Twin::MarkOnWake) {
            home.holder.store(thread_mark(), Ordering::Relaxed);
        }
        guard.waiters -= 1;
        self.guard = Some(guard);
    }
}

impl<K: Eq + Hash, M, X, S: BuildHasher, E: Evict> Drop for Held<'_, K, M, X, S, E> {
    fn drop(&mut self) {
        if self.guard.is_none() {
            return;
        }
        if !is_left_out(Twin::TakeReturned) {
            self.take_returned();
        }
        let waiters = self.inner().waiters;
        if !is_left_out(Twin::EraseMarkOnLeave) {
            self.home.holder.store(0, Ordering::Relaxed);
        }
        self.guard = None;
        if waiters > 0 && !is_left_out(Twin::NotifyOnLeave) {
            if is_left_out(Twin::NotifyEveryone) {
                return self.home.changed.notify_one();
            }
            self.home.changed.notify_all();
        }
    }
}
