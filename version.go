package nsq

// VERSION is the version of this library, as it appears in the default user agent.
const VERSION = "0.1.0"
