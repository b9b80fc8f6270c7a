//! State that a policy keeps beside a layer's slots.
//!
//! A policy needs more than tracks and tensors where its state has parts of its own, such as a
//! sketch with its hash functions. It implements [`PolicyState`] for a type and gives the cache an
//! object of it. The cache knows nothing of what is inside: it moves, copies, joins, counts, saves
//! and loads the object through the trait, and tells it of what happens to the slots.
//!
//! Files do not name a state's type. A loaded cache therefore holds a state's header and tensors
//! until the policy calls [`LayerCache::restore_state`].

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;

use burn::tensor::{Device, TensorData};
use serde::Serialize;
use serde_json::Value;

use crate::{Error, LayerCache, Result};

/// State of a policy in one layer's cache, on the cache's device.
///
/// Methods that tell of an event have defaults that do nothing.
pub trait PolicyState: Any + Debug + Send + Sync {
    /// The state's name among all states of a cache, and in files.
    fn name(&self) -> &'static str;

    /// A deep copy: a kernel that writes into this state must not write into the copy. `None` for
    /// state of a single step, which copies go without.
    fn copied(&self) -> Option<Box<dyn PolicyState>>;

    /// The state on another device; `None` as for [`Self::copied`].
    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>>;

    /// Joins the states of several caches of one layer whose sequences are batched. `self` is the
    /// first cache's state; `others` are the other caches' states of this name, in order.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for states that cannot be joined.
    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>>;

    /// Whether [`Self::replace_row`] can put the one sequence of another state in the place of any
    /// row.
    fn accepts(&self, _from: &dyn PolicyState) -> bool {
        false
    }

    /// Puts the one sequence of another state in the place of a row, in place: the state's tensors
    /// stay, since recorded steps read and write them.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for states that cannot do so, or of another type or size.
    fn replace_row(&mut self, _row: usize, _from: &dyn PolicyState) -> Result<()> {
        let reason = format!("rows of `{}` cannot be replaced", self.name());
        Err(Error::InvalidPlan { what: "state", reason })
    }

    /// Makes room: each row of this state can then hold every sequence that a row of `like` can
    /// hold, and [`Self::accepts`] takes it. A state stays as it is where its size does not depend
    /// on its sequence, or where rows cannot be replaced.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where `like` is of another type, [`Error::Kernel`].
    fn widen(&mut self, _like: &dyn PolicyState) -> Result<()> {
        Ok(())
    }

    /// The state in host memory. `None` as for [`Self::copied`].
    ///
    /// # Errors
    /// [`Error::Read`] where the device cannot be read.
    fn to_host(&self) -> Result<Option<HostState>>;

    /// Whether files can hold the state. A cache with a state that files cannot hold is refused
    /// before the device is read.
    fn is_savable(&self) -> bool {
        true
    }

    /// The bytes of this state of `cache`.
    fn bytes(&self, cache: &LayerCache) -> StateBytes;

    /// Checks that the state has room for `tokens` more tokens of every sequence. The state of a
    /// growable cache can make room.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`].
    fn check_room(&self, _tokens: usize, _growable: bool) -> Result<()> {
        Ok(())
    }

    /// Makes room for `tokens` more tokens of every sequence, before they are appended.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where there is none and the cache does not grow.
    fn reserve(&mut self, tokens: usize, growable: bool) -> Result<()> {
        self.check_room(tokens, growable)
    }

    /// Tells the state that every sequence has seen `tokens` more tokens.
    fn appended(&mut self, _tokens: usize) {}

    /// Tells the state that slots have moved: the pool is a new one, or its rows have changed.
    ///
    /// # Errors
    /// The errors of the kernels that update the state.
    fn slots_moved(&mut self, _cache: &LayerCache) -> Result<()> {
        Ok(())
    }

    /// Counts `tokens` more tokens of every sequence as seen, without contents. Measurements of
    /// long contexts need it.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`].
    fn assume(&mut self, tokens: usize) -> Result<()> {
        self.reserve(tokens, false)?;
        self.appended(tokens);
        Ok(())
    }

    /// A head's lengths within and after a step of the state's own, from `before` slots on. `None`
    /// if the state's steps do not change lengths by themselves.
    fn lengths_of_step(&self, _head: usize, _before: usize) -> Option<StepLengths> {
        None
    }

    /// Whether the cache must drop the state once limits change, or once slots are appended,
    /// dropped or reordered by anything but the state's own steps.
    fn is_void_once_slots_change(&self) -> bool {
        false
    }

    /// Whether the state's own steps set this track's value of a new token, so that an append
    /// leaves it alone.
    fn sets_track(&self, _track: &str) -> bool {
        false
    }

    /// A counter on the host that steps advance; 0 without one. A step that is recorded and not run
    /// must not advance it: [`Self::set_counter`] then puts it back.
    fn counter(&self) -> usize {
        0
    }

    /// Puts back the number that [`Self::counter`] returned.
    fn set_counter(&mut self, _counter: usize) {}
}

/// A state that files can hold.
pub trait LoadState: PolicyState + Sized {
    /// The state's name, as [`PolicyState::name`] returns it.
    const NAME: &'static str;

    /// Builds the state from its saved form, which [`PolicyState::to_host`] made, for a cache that
    /// has its slots already. `seen` has the number of tokens that each sequence has seen. Files
    /// are not trusted: contents that do not fit the cache are refused.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] that says what does not fit.
    fn load(saved: SavedState, cache: &LayerCache, seen: &[usize]) -> Result<Self>;
}

/// Slots of a head around a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLengths {
    /// The most slots of the head within the step, such as before the step drops some.
    pub within: usize,
    /// The slots of the head after the step.
    pub behind: usize,
}

/// Bytes of a state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateBytes {
    /// Bytes on the device.
    pub device: usize,
    /// Bytes in host memory.
    pub host: usize,
    /// Working memory of a step on the device, which layers share.
    pub scratch: usize,
}

/// A state in host memory.
#[derive(Debug)]
pub enum HostState {
    /// Tensors and a header, which files can hold.
    Saved(SavedState),
    /// An object that lives in host memory anyway, and that no file holds.
    Kept(Box<dyn PolicyState>),
}

impl HostState {
    /// A state as files hold it: its header, and its tensors by name, which `read` copies from the
    /// device. `what` names the state in errors.
    ///
    /// # Errors
    /// [`Error::Read`] where the device cannot be read, or the header is no JSON.
    pub fn saved<T: LoadState, E: ToString, const N: usize>(
        _state: &T,
        what: &'static str,
        header: impl Serialize,
        read: impl FnOnce() -> [(&'static str, std::result::Result<TensorData, E>); N],
    ) -> Result<Self> {
        let failed = |reason: String| Error::Read { what, reason };
        let header = serde_json::to_value(header).map_err(|error| failed(error.to_string()))?;
        let _work = kv_kernels::device_work();
        let tensors = read().into_iter().map(|(name, data)| {
            Ok((name.to_string(), data.map_err(|error| failed(error.to_string()))?))
        });
        Ok(Self::Saved(SavedState::of::<T>(header, tensors.collect::<Result<_>>()?)))
    }
}

impl Clone for HostState {
    fn clone(&self) -> Self {
        match self {
            Self::Saved(saved) => Self::Saved(saved.clone()),
            // What is kept in host memory has copies.
            Self::Kept(state) => match state.copied() {
                Some(copy) => Self::Kept(copy),
                None => Self::Saved(SavedState::default()),
            },
        }
    }
}

/// The saved form of a state, as files hold it.
#[derive(Debug, Clone, Default)]
pub struct SavedState {
    /// The parts of the state that are not tensors.
    pub header: Value,
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorData>,
    /// The function that builds the state; `None` for a form that was read from a file.
    pub(crate) load: Option<Load>,
}

pub(crate) type Load = fn(SavedState, &LayerCache, &[usize]) -> Result<Box<dyn PolicyState>>;

impl SavedState {
    /// The saved form of a state of type `T`.
    pub fn of<T: LoadState>(header: Value, tensors: BTreeMap<String, TensorData>) -> Self {
        Self { header, tensors, load: Some(load::<T>) }
    }

    /// Takes out the tensor `name`, of any shape and of one of `dtypes`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] that names the dtypes.
    pub fn take_any(&mut self, name: &str, dtypes: &[burn::tensor::DType]) -> Result<TensorData> {
        let found = self.tensors.get(name).map(|data| data.dtype());
        let own = dtypes.iter().copied().find(|&dtype| Some(dtype) == found);
        self.take(name, own.unwrap_or(dtypes[0]), &[])
    }

    /// Takes out a tensor of a dtype and, where the expected shape is not empty, of that shape.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] that names both.
    pub fn take(
        &mut self,
        name: &str,
        dtype: burn::tensor::DType,
        shape: &[usize],
    ) -> Result<TensorData> {
        let invalid = |reason: String| Error::InvalidPlan { what: "state", reason };
        let found = self.tensors.remove(name);
        let data = found.ok_or_else(|| invalid(format!("there is no tensor `{name}`")))?;
        let actual: Vec<usize> = data.shape().iter().copied().collect();
        if data.dtype() != dtype || (!shape.is_empty() && actual != shape) {
            let found = data.dtype();
            return Err(invalid(format!(
                "`{name}` is {found:?} {actual:?}, expected {dtype:?} {shape:?}"
            )));
        }
        Ok(data)
    }
}

/// States of one type, `first` and `others`, as [`PolicyState::joined`] is given them.
///
/// # Errors
/// [`Error::InvalidPlan`] where one is of another type.
pub fn states_of<'a, T: PolicyState>(
    first: &'a T,
    others: &[&'a dyn PolicyState],
) -> Result<Vec<&'a T>> {
    std::iter::once(Ok(first)).chain(others.iter().map(|&other| state_of(other))).collect()
}

/// A state of type `T`, as [`PolicyState::replace_row`] is given it.
///
/// # Errors
/// [`Error::InvalidPlan`] where it is of another type.
pub fn state_of<T: PolicyState>(state: &dyn PolicyState) -> Result<&T> {
    (state as &dyn Any).downcast_ref().ok_or_else(|| {
        let reason = format!("states of several types have the name `{}`", state.name());
        Error::InvalidPlan { what: "state", reason }
    })
}

fn load<T: LoadState>(
    saved: SavedState,
    cache: &LayerCache,
    seen: &[usize],
) -> Result<Box<dyn PolicyState>> {
    Ok(Box::new(T::load(saved, cache, seen)?))
}

/// A state of a cache, or its saved form until a policy restores it.
#[derive(Debug)]
pub(crate) enum StoredState {
    /// The state.
    State(Box<dyn PolicyState>),
    /// The saved form, and the number of tokens that each sequence has seen.
    Saved(SavedState, Vec<usize>),
}

/// The states of a cache, by name.
#[derive(Debug, Default)]
pub(crate) struct States(pub(crate) BTreeMap<String, StoredState>);

impl States {
    /// All states that need not be restored.
    pub(crate) fn live(&self) -> impl Iterator<Item = &dyn PolicyState> {
        self.0.values().filter_map(|stored| match stored {
            StoredState::State(state) => Some(&**state),
            StoredState::Saved(..) => None,
        })
    }

    /// [`Self::live`] by mutable reference.
    pub(crate) fn live_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn PolicyState>> {
        self.0.values_mut().filter_map(|stored| match stored {
            StoredState::State(state) => Some(state),
            StoredState::Saved(..) => None,
        })
    }

    /// Whether some state's own steps set this track of a new token.
    pub(crate) fn set_track(&self, track: &str) -> bool {
        self.live().any(|state| state.sets_track(track))
    }

    /// Drops the states that are void once slots or limits have changed.
    pub(crate) fn drop_void(&mut self) {
        self.0.retain(|_, stored| match stored {
            StoredState::State(state) => !state.is_void_once_slots_change(),
            StoredState::Saved(..) => true,
        });
    }

    /// Each state's counter, in the order of names.
    pub(crate) fn counters(&self) -> Vec<usize> {
        self.live().map(PolicyState::counter).collect()
    }

    /// Puts counters back.
    pub(crate) fn set_counters(&mut self, counters: &[usize]) {
        let each = self.live_mut().zip(counters);
        each.for_each(|(state, counter)| state.set_counter(*counter));
    }

    /// The states that `change` returns; states for which it returns `None` are left out.
    pub(crate) fn map(
        &self,
        change: impl Fn(&dyn PolicyState) -> Option<Box<dyn PolicyState>>,
    ) -> Self {
        let each = self.0.iter().filter_map(|(name, stored)| {
            let stored = match stored {
                StoredState::State(state) => StoredState::State(change(&**state)?),
                StoredState::Saved(saved, seen) => StoredState::Saved(saved.clone(), seen.clone()),
            };
            Some((name.clone(), stored))
        });
        Self(each.collect())
    }

    /// The states of several caches, batched.
    pub(crate) fn joined(parts: &[&Self]) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidPlan { what: "concat", reason };
        let mut names: Vec<&String> = parts.iter().flat_map(|part| part.0.keys()).collect();
        names.sort();
        names.dedup();
        let mut joined = BTreeMap::new();
        for name in names {
            let own: Vec<&StoredState> = parts.iter().filter_map(|part| part.0.get(name)).collect();
            let mut live = Vec::new();
            for stored in &own {
                match stored {
                    StoredState::State(state) => live.push(&**state),
                    StoredState::Saved(..) => return Err(unrestored(name)),
                }
            }
            let Some((first, others)) = live.split_first() else { continue };
            // State of one step only is not joined.
            if first.copied().is_none() {
                continue;
            }
            if live.len() != parts.len() {
                let (count, all) = (live.len(), parts.len());
                return Err(invalid(format!("state `{name}` is in {count} of {all} caches")));
            }
            joined.insert(name.clone(), StoredState::State(first.joined(others)?));
        }
        Ok(Self(joined))
    }

    /// Refuses steps while a state has not been restored.
    pub(crate) fn check_restored(&self) -> Result<()> {
        let saved = self.0.iter().find(|(_, stored)| matches!(stored, StoredState::Saved(..)));
        saved.map_or(Ok(()), |(name, _)| Err(unrestored(name)))
    }
}

fn unrestored(name: &str) -> Error {
    let reason = format!(
        "`{name}` comes from a file, and no policy has restored it: start with the policy that \
         made the cache"
    );
    Error::InvalidPlan { what: "state", reason }
}

impl LayerCache {
    /// A policy's state of type `T`, where the cache has one.
    pub fn policy_state<T: PolicyState>(&self) -> Option<&T> {
        self.states.live().find_map(|state| (state as &dyn Any).downcast_ref())
    }

    /// [`Self::policy_state`] by mutable reference.
    pub fn policy_state_mut<T: PolicyState>(&mut self) -> Option<&mut T> {
        self.states.live_mut().find_map(|state| (&mut **state as &mut dyn Any).downcast_mut())
    }

    /// Gives the cache a state in place of the state of its name, if there is one.
    pub fn insert_policy_state<T: PolicyState>(&mut self, state: T) {
        let name = state.name().to_string();
        self.states.0.insert(name, StoredState::State(Box::new(state)));
    }

    /// Takes a state of type `T` out of the cache, so that both can be changed together.
    pub fn take_policy_state<T: PolicyState>(&mut self) -> Option<T> {
        let is_it = |stored: &StoredState| match stored {
            StoredState::State(state) => (&**state as &dyn Any).is::<T>(),
            StoredState::Saved(..) => false,
        };
        let name = self.states.0.iter().find(|(_, stored)| is_it(stored))?.0.clone();
        match self.states.0.remove(&name)? {
            StoredState::State(state) => {
                (state as Box<dyn Any>).downcast::<T>().ok().map(|state| *state)
            }
            StoredState::Saved(..) => None,
        }
    }

    /// Lends the state of type `T` to `run`, beside the cache; `None` without such a state.
    pub fn with_policy_state<T: PolicyState, R>(
        &mut self,
        run: impl FnOnce(&mut T, &Self) -> R,
    ) -> Option<R> {
        let mut state = self.take_policy_state()?;
        let result = run(&mut state, self);
        self.insert_policy_state(state);
        Some(result)
    }

    /// Builds the state of type `T` from the saved form that was read from a file. Does nothing
    /// where the cache has no such form.
    ///
    /// # Errors
    /// The errors of [`LoadState::load`]; the cache is then unchanged.
    pub fn restore_state<T: LoadState>(&mut self) -> Result<()> {
        let Some(StoredState::Saved(saved, seen)) = self.states.0.get(T::NAME) else {
            return Ok(());
        };
        let state = T::load(saved.clone(), self, seen)?;
        self.states.0.insert(T::NAME.into(), StoredState::State(Box::new(state)));
        Ok(())
    }

    /// Tells every state that slots have moved.
    pub(crate) fn tell_slots_moved(&mut self) -> Result<()> {
        let mut states = std::mem::take(&mut self.states);
        let told = states.live_mut().try_for_each(|state| state.slots_moved(self));
        self.states = states;
        told
    }
}
