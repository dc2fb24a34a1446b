//go:build race

package nsq

const raceDetector = true
